"""The column S3 of the quickstart and the pages it links, line by line from an empty cluster.

API server, controllers, admission and MinIO are real. Kubeflow's API is the stand-in, the stores of
runs are folders, the owner's pod is run on no node, and no image is pushed. The run that is
verified and resumed is the tests' own (tests/kit/pipeline_runs/honest_run.py).
"""

from __future__ import annotations

import base64
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import test_cluster_pages as pages
from conftest import CONTROLLER, FRAME, INFRA, MAY_MAKE_PODS, wait_until_in_force
from control_plane import ControlPlane
from pods import compiled
from test_stores import OWNER, URL, Stores


class Walk:
    """A shell that runs one line after the other."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.folder, self.environment = folder, environment

    def run(self, line: str, code: int = 0) -> str:
        """Runs a line where the walk is, stays where it leads, and returns what it printed."""
        done = subprocess.run(
            ["bash", "-c", f"{line}\ncode=$?; pwd > {self.folder}/where; exit $code"],
            cwd=(self.folder / "where").read_text().strip(),
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert done.returncode == code, f"{line}\n{done.stdout}"
        return done.stdout


@pytest.fixture
def empty(plane) -> ControlPlane:
    """A cluster with Kubeflow's namespaces and nothing of ours."""
    plane.kubectl("delete", "namespace", "fedemb", "--ignore-not-found", "--wait=true")
    plane.apply(*FRAME[:2])  # our own comes from the profile
    return plane


def _cluster_lines(walk: Walk, plane: ControlPlane, line: str) -> None:
    """What the shell, kubectl and mc do, at the control plane and at the store."""
    if line.startswith("kubectl apply -f infra/kustomize/profile.yaml"):
        walk.run(line, 1)  # no Kubeflow here defines a Profile
        store = {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": "mlpipeline-minio-artifact", "namespace": "fedemb"},
            "stringData": {"accesskey": "a", "secretkey": "b"},
        }
        plane.apply(*FRAME, MAY_MAKE_PODS, store)  # Kubeflow's own
        return
    refused = "run thief" in line
    if refused:
        wait_until_in_force(plane)
    if "photos.parquet" in line:
        walk.run("touch photos.parquet")
    here = re.sub("ROOT_USER|ROOT_PASSWORD", OWNER, line.replace("https://STORE", URL))
    printed = walk.run(here, 1 if refused or " diff " in line else 0)
    assert not refused or "ValidatingAdmissionPolicy" in printed
    if "owner.yaml" in line and line.startswith("kubectl create"):
        _owners_pod(walk, plane)


def _owners_pod(walk: Walk, plane: ControlPlane) -> None:
    """Does what the kubelet would: runs the container with the owner's access key."""
    pod = json.loads(plane.kubectl("get", "pod", "fedemb-owner", "-n", "fedemb", "-o", "json"))
    (main,) = pod["spec"]["containers"]
    secret = json.loads(
        plane.kubectl("get", "secret", "fedemb-s3-owner", "-n", "fedemb", "-o", "json")
    )
    walk.environment |= {"AWS_ENDPOINT_URL": URL, "AWS_DEFAULT_REGION": "us-east-1"}
    for variable in main["env"]:
        held = secret["data"][variable["valueFrom"]["secretKeyRef"]["key"]]
        walk.environment[variable["name"]] = base64.b64decode(held).decode()
    here = {"/config/run.yaml": "run.yaml", "/keys": str(walk.folder / "keys-of-owner")}
    walk.run(shlex.join(here.get(word, word) for word in main["args"]))
    ended = ("--subresource=status", "--type=merge", '-p={"status": {"phase": "Succeeded"}}')
    plane.kubectl("patch", "pod", "fedemb-owner", "-n", "fedemb", *ended)


def test_pods_of_a_laptop_cluster_are_admitted(plane, applied, ask, tmp_path):
    laptop = INFRA / "kustomize/overlays/laptop"
    plane.kubectl("apply", "--dry-run=server", "-f", f"{laptop}/minio.yaml")
    with applied("laptop"):
        profiles = ("cpu", INFRA / "profiles" / "s3.yaml", laptop / "profile.yaml")
        for pod in compiled(tmp_path, *profiles).values():
            answer = ask.pod(pod, CONTROLLER)
            assert answer.taken, answer.message


def test_quickstart_commands_for_s3_work_on_an_empty_cluster(empty, tmp_path_factory):
    stores = Stores(empty.binaries, tmp_path_factory.mktemp("stores"), empty.kubeconfig)
    for world in pages.world.__wrapped__(tmp_path_factory):
        root, _, kubeflow = world
        shutil.copytree(INFRA, root / "infra")
        (root / "where").write_text(str(root))
        binaries = f"{empty.binaries}:{Path(sys.executable).parent}"
        environment = {**os.environ, "KUBECONFIG": str(empty.kubeconfig)}
        environment |= {"PATH": f"{binaries}:{os.environ['PATH']}"}
        walk = Walk(root, environment)
        for line in pages.commands("S3"):
            if line.startswith("export "):
                found = (word.split("=", 1) for word in shlex.split(line)[1:])
                walk.environment |= dict(found)
            elif line.startswith("fedemb ") and "ledger verify --ledger $LEDGER" not in line:
                _our_line(walk, line, world)
            elif not line.startswith("make "):  # needs a registry
                _cluster_lines(walk, empty, line)
        stores.process.terminate()
        assert len(kubeflow.runs) == 2, "one submitted, one resumed"


def _our_line(walk: Walk, line: str, world) -> None:
    """A command of ours, with this machine's folders for the stores."""
    root, run, kubeflow = world
    s3 = f"--profile gpu --profile {INFRA}/profiles/s3.yaml"
    arguments = pages._here(line.replace("$PROFILES", s3), root, run, kubeflow.url)
    if arguments[0] == "config":
        shutil.copy(root / "run.yaml", root / "deploy")
    if arguments[0] == "schedule":
        if not (root / "schedules").exists():
            pages._schedules(root)
        if not {"--dry-run", "--check"} & {*arguments}:
            arguments.append("--yes")
        if "--host" in arguments:
            arguments += s3.split()
    program = [sys.executable, "-c", OURS, *arguments]
    where = (root / "where").read_text()
    (root / "where").write_text(str(root))
    walk.run(shlex.join(program), 2 if arguments[0] == "check-data" else 0)  # too few users
    (root / "where").write_text(where)


OURS = f"""
import sys
sys.path[:0] = [{str(INFRA.parent / "tests")!r}, {str(INFRA.parent)!r}]
from tests.kit.pipeline_runs import honest_run
from fedemb.pipelines.cli.main import main
with honest_run.stand_in_for_serving():
    main()
"""
