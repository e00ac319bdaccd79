"""The control plane, the overlays as the cluster pages apply them, and who asks."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
from control_plane import PATIENCE, ControlPlane
from pods import Asker, plain

sys.path.insert(0, str(Path(__file__).parents[1] / "pipelines"))
from test_cluster_pages import lines_of, quickstart

INFRA = Path(__file__).parents[2] / "infra"
COLUMN = {"gke": "GKE", "s3": "S3", "laptop": "Laptop"}
"""Overlay -> its column of the quickstart."""
CONTROLLER = "system:serviceaccount:kubeflow:argo"
FRAME = [
    {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
    for name in ("kubeflow", "minio", "fedemb")
]
MAY_MAKE_PODS = {
    "apiVersion": "rbac.authorization.k8s.io/v1",
    "kind": "RoleBinding",
    "metadata": {"name": "makes-pods", "namespace": "fedemb"},
    "roleRef": {
        "apiGroup": "rbac.authorization.k8s.io",
        "kind": "ClusterRole",
        "name": "cluster-admin",
    },
    "subjects": [
        {"kind": "User", "name": name} for name in (CONTROLLER, "alice@example.org", "owner")
    ],
}
"""More than Kubeflow gives its controller and its members: admission alone is left."""


@pytest.fixture(scope="session")
def plane(tmp_path_factory) -> Iterator[ControlPlane]:
    """A control plane without anything in it but the namespaces of Kubeflow."""
    binaries = os.environ.get("FEDEMB_CONTROL_PLANE")
    if not binaries:
        pytest.skip("no control plane was built; run `make test-cluster`")
    with ControlPlane(Path(binaries), tmp_path_factory.mktemp("plane")) as plane:
        plane.apply(*FRAME)
        plane.apply(MAY_MAKE_PODS)
        yield plane


@pytest.fixture(scope="session")
def applied(plane, tmp_path_factory) -> Callable[[str], AbstractContextManager[None]]:
    """Applies an overlay by the quickstart's own lines, and takes it away again."""

    @contextmanager
    def apply(name: str) -> Iterator[None]:
        folder = tmp_path_factory.mktemp("deploy")
        lines = lines_of(quickstart(COLUMN[name]))
        start = next(at for at, line in enumerate(lines) if line.startswith("cp -r infra"))
        end = next(at for at, line in enumerate(lines) if "launcher.yaml" in line)
        block = "\n".join(lines[start : end + 1])
        shutil.copytree(INFRA, folder / "infra")
        environment = {**os.environ, "KUBECONFIG": str(plane.kubeconfig), "OVERLAY": name}
        done = subprocess.run(
            ["bash", "-c", block],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert "Warning" not in done.stderr
        wait_until_in_force(plane)
        plane.deployed = folder / "deploy" / "kustomize" / "overlays" / name
        yield
        plane.kubectl("delete", "-k", str(plane.deployed), "--ignore-not-found", "--wait=true")
        plane.apply(*FRAME)
        plane.apply(MAY_MAKE_PODS)

    return apply


@pytest.fixture(scope="module", params=["gke", "s3"])
def overlay(request, applied) -> Iterator[str]:
    """One overlay after the other."""
    with applied(request.param):
        yield request.param


def wait_until_in_force(plane: ControlPlane) -> None:
    """Admission policies reach the API server a moment after they are written."""
    until = time.monotonic() + PATIENCE
    while True:
        step = Asker(plane).pod(plain("fedemb-run", "gate-release"), CONTROLLER)
        thief = Asker(plane).pod(plain("fedemb-gate"), CONTROLLER)
        account = step.body["spec"]["serviceAccountName"] if step.taken else None
        if account == "fedemb-gate" and not thief.taken:
            return
        assert time.monotonic() < until, "the policies are not in force"
        time.sleep(0.2)


@pytest.fixture
def reapply(plane, overlay):
    """Puts the overlay back as it was."""

    def again() -> None:
        force = ("apply", "--server-side", "--force-conflicts")
        plane.kubectl(*force, "-k", str(plane.deployed))
        plane.kubectl(*force, "-f", f"{plane.deployed}/launcher.yaml")
        wait_until_in_force(plane)

    return again


@pytest.fixture
def ask(plane) -> Asker:
    """Asks the API server whether it would take an object, from whomever."""
    return Asker(plane)


def page_block(begins: str) -> str:
    """Returns the indented block of commands of the cluster pages with this start."""
    pages = sorted((INFRA.parent / "docs" / "cluster").glob("*.md"))
    text = "\n".join(page.read_text() for page in pages)
    blocks = re.findall(r"(?:^    .*\n)+", text, re.MULTILINE)
    (found,) = [block for block in blocks if block.strip().startswith(begins)]
    return "\n".join(line[4:] for line in found.splitlines())
