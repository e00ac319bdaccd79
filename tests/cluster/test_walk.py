"""The cluster pages, run line by line from an empty cluster, as far as one machine can.

    FEDEMB_WALK=build/walk.md make test-cluster ARGS=tests/cluster/test_walk.py

writes down every line with what it printed. The cluster is the real control plane and node of this
folder; Kubeflow's API is the stand-in, object stores are folders; what needs a cloud is named.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import FRAME, INFRA, MAY_MAKE_PODS, wait_until_in_force
from control_plane import ControlPlane

sys.path.insert(0, str(Path(__file__).parents[1] / "pipelines"))
import test_cluster_pages as pages

HEAD = """\
# The cluster pages, walked

Every line of `docs/cluster/quickstart.md` and of the pages it links, in order, from an empty
cluster, with what it printed: made by `tests/cluster/test_walk.py`. The API server, its
controllers and admission are
real ({version}). Kubeflow's API is a stand-in, stores are folders, and commands of `gcloud`,
`terraform`, `aws` or `mc` needs a cloud or a store: it is named, not tried. The run that is
verified and resumed is the tests' own (`tests/kit/pipeline_runs/honest_run.py`): no image trained
it. Addresses and digests are shortened; words in capitals are placeholders, as in the pages.
`<code>` after a line is its exit code, where it is not 0.

"""
NAMESPACES = FRAME[:2]
"""Where Kubeflow lives, and its store; our own comes from the profile."""
MOST_LINES = 40


class Walk:
    """Lines, and what they printed."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.folder, self.environment = folder, environment
        self.shown: list[str] = []

    def say(self, line: str, output: str = "", code: int = 0) -> None:
        """Writes a line down."""
        self.shown.append(f"$ {line}" + (f"    <{code}>" if code else ""))
        lines = output.rstrip().splitlines()
        if len(lines) > MOST_LINES:
            cut = len(lines) - MOST_LINES
            lines[MOST_LINES - 5 : -5] = [f"({cut} lines of the same kind are left out)"]
        self.shown += [f"  {text}" for text in lines]

    def run(self, line: str, as_here: str | None = None) -> subprocess.CompletedProcess[str]:
        """Runs a line where the walk is, and stays where it leads."""
        command = f"{as_here or line}\ncode=$?; pwd > {self.folder}/where; exit $code"
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=(self.folder / "where").read_text().strip(),
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        self.say(line, done.stdout, done.returncode)
        return done


@pytest.fixture
def empty(plane) -> ControlPlane:
    """A cluster with Kubeflow's namespaces and nothing of ours."""
    plane.kubectl("delete", "namespace", "fedemb", "--ignore-not-found", "--wait=true")
    plane.apply(*NAMESPACES)
    return plane


def _plain(text: str, root: Path, url: str) -> str:
    """Without what differs from walk to walk."""
    for found, word in ((url, "URL"), (str(root), "/here"), (str(INFRA.parent), "/repository")):
        text = text.replace(found, word)
    text = re.sub(r"\b([0-9a-f]{8})[0-9a-f]{24,56}\b", r"\1...", text)
    return re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE)


def _cluster_lines(walk: Walk, plane: ControlPlane, line: str, block: list[str]) -> None:
    """What the shell and kubectl do, at the control plane."""
    if line.startswith("kubectl apply -f infra/kustomize/profile.yaml"):
        assert walk.run(line).returncode, "no Kubeflow here defines a Profile"
        walk.say("kubectl create namespace fedemb    # in Kubeflow's place")
        plane.apply(*FRAME, MAY_MAKE_PODS)
    elif line.startswith("for group in"):
        kept = [each for each in block if not each.startswith("mc ")]
        text = "\n".join(kept)
        done = walk.run("\n  ".join(block), text)
        assert done.returncode == 0, done.stdout
        store = {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": "mlpipeline-minio-artifact", "namespace": "fedemb"},
            "stringData": {"accesskey": "a", "secretkey": "b"},
        }
        plane.apply(store)  # Kubeflow's own
    else:
        refused = "run thief" in line
        if refused:
            wait_until_in_force(plane)
        done = walk.run(line, line.replace("overlays/gke", "overlays/s3"))
        differs = " diff " in line
        nothing = line.startswith("kubectl -n fedemb logs")
        assert done.returncode == (1 if refused or differs or nothing else 0), done.stdout
        assert not refused or "ValidatingAdmissionPolicy" in done.stdout


def _secrets_of_s3() -> list[str]:
    """Returns the loop of the reference that creates one secret per group.

    The quickstart shows Google Cloud; the walk applies the overlay for S3 in its place.
    """
    lines = pages.lines_of(pages.REFERENCE)
    start = next(i for i, line in enumerate(lines) if line.startswith("for group in"))
    return lines[start : lines.index("done", start) + 1]


def test_the_pages_from_an_empty_cluster(empty, tmp_path_factory, monkeypatch):
    started = time.monotonic()
    for world in pages.world.__wrapped__(tmp_path_factory):
        root, _, kubeflow = world
        (root / "infra").symlink_to(INFRA)
        (root / "where").write_text(str(root))
        binaries = f"{empty.binaries}:{Path(sys.executable).parent}"
        environment = {**os.environ, "KUBECONFIG": str(empty.kubeconfig)}
        environment |= {"PATH": f"{binaries}:{os.environ['PATH']}", "COLUMNS": "160"}
        environment["PYTHONWARNINGS"] = "ignore"  # of a certificate no one signed
        walk = Walk(root, environment)
        lines = pages.commands()
        applied = next(
            i for i, line in enumerate(lines) if " -k overlays/gke" in line and " diff " not in line
        )
        lines[applied + 1 : applied + 1] = _secrets_of_s3()
        modules = (Path(__file__).parent / "control_plane" / "go.mod").read_text()
        version = re.findall(r"k8s.io/kubernetes (v\S+)", modules)[0]
        at = 0
        while at < len(lines):
            line, at = lines[at], at + 1
            first = pages._first_word(line)
            block = [line]
            if first == "for" and not line.endswith("done"):
                while block[-1] != "done":
                    block, at = [*block, lines[at]], at + 1
            elsewhere = "mc mb" in line or first in ("make", "REGISTRY=registry.example/you")
            if first in pages.NOT_HERE or elsewhere or line.startswith("cd infra"):
                walk.say(line, "(not tried: needs a cloud, or a store)")
            elif first == "fedemb":
                _our_line(walk, line, world)
            else:
                _cluster_lines(walk, empty, line, block)
        assert len(kubeflow.runs) == 2, "one submitted, one resumed"
        if target := os.environ.get("FEDEMB_WALK"):
            seconds = time.monotonic() - started
            shown = _plain("\n".join(walk.shown), root, kubeflow.url)
            page = HEAD.format(version=version)
            page += f"```\n{shown}\n```\n\nThe walk took {seconds:.0f} s.\n"
            (INFRA.parent / target).write_text(page)


def _our_line(walk: Walk, line: str, world) -> None:
    """A command of ours, with this machine's folders for the stores."""
    root, run, kubeflow = world
    arguments = pages._here(line, root, run, kubeflow.url)
    if arguments[0] == "schedule" and not (root / "schedules").exists():
        pages._schedules(root)
    if arguments[0] == "schedule" and not {"--dry-run", "--check"} & {*arguments}:
        arguments.append("--yes")
    if arguments[0] == "doctor":
        arguments += ["--profile", str(INFRA / "profiles" / "s3.yaml")]
    if arguments[0] in ("submit", "schedule") and "--host" in arguments:
        s3 = str(INFRA / "profiles" / "s3.yaml")
        arguments += ["--profile", "gpu", "--profile", s3]
    program = [sys.executable, "-c", OURS, *arguments]
    where = (root / "where").read_text()
    (root / "where").write_text(str(root))
    done = walk.run(line, shlex.join(program))
    (root / "where").write_text(where)
    few = arguments[0] == "check-data"  # fewer users than the policy needs
    assert done.returncode == (2 if few else 0), done.stdout


OURS = f"""
import sys
sys.path[:0] = [{str(INFRA.parent / "tests")!r}, {str(INFRA.parent)!r}]
from tests.kit.pipeline_runs import honest_run
from fedemb.pipelines.cli.main import main
with honest_run.stand_in_for_serving():
    main()
"""
