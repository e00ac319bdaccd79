"""Steps of the image `light` as pods on a real node, behind admission, on volumes.

Each pod is that of the compiled pipeline, without the containers that Argo and Kubeflow add: their
images are in registries. What the launcher would fetch lies on a volume.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import CONTROLLER, INFRA
from node import Ended, Node
from pods import compiled

from fedemb.pipelines.steps import all_steps, key_claims
from fedemb.provenance import privacy_code_digest
from fedemb.step import declared
from tests import honest_run

USER = 65532
"""Of the images."""
IMAGE = "localhost/fedemb-light"


@pytest.fixture(scope="module")
def light(tmp_path_factory) -> Path:
    """The image, as an archive: `FEDEMB_LIGHT_ARCHIVE`, or what `make images` left in podman."""
    if given := os.environ.get("FEDEMB_LIGHT_ARCHIVE"):
        return Path(given)
    if shutil.which("podman") is None:
        pytest.skip("there is no image `light`; run `make images` with podman")
    archive = tmp_path_factory.mktemp("image") / "light.tar"
    command = ["podman", "save", "--format", "docker-archive", "-o", archive, IMAGE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"there is no image `light`; run `make images` ({done.stderr.strip()[-100:]})")
    return archive


@pytest.fixture(scope="module", params=["s3"])
def overlay(request, applied):
    """Keys on volumes, as a cluster without Secret Manager has them."""
    with applied(request.param):
        yield request.param


@pytest.fixture(scope="module")
def node(plane, overlay, light, tmp_path_factory) -> Iterator[Node]:
    """A node with the image, in the cluster as the runbook leaves it."""
    if os.geteuid() or shutil.which("runc") is None:
        pytest.skip("a node needs root and runc (`apt-get install runc`)")
    with Node(plane, tmp_path_factory.mktemp("node") / "n") as node:
        node.load(light)
        yield node


@pytest.fixture(scope="module")
def world(plane, node, tmp_path_factory) -> World:
    """An honest run on volumes that belong to the user of the images."""
    return World(node, tmp_path_factory.mktemp("world"))


class World:
    """A run whose folders are volumes, and the pods of its pipeline."""

    def __init__(self, node: Node, root: Path) -> None:
        self.node, self.root = node, root
        root.chmod(0o755)
        self.pods = compiled(root, "cpu", INFRA / "profiles" / "s3.yaml")
        self.run = honest_run.start(root / "monday").until_gate()
        self.next = honest_run.start(root / "tuesday", "tuesday", self.run.policy_root)
        self.next.do_plan()
        self.next.do_pretrain()
        keys = Path(self.run.keys_uri)
        held = {
            claim: keys / folder
            for step in all_steps().values()
            for claim, folder in key_claims(step.rights).items()
        }
        for folder in held.values():
            folder.mkdir(parents=True, exist_ok=True)
        for claim, folder in {"world": root, **held}.items():
            self._volume(claim, folder)
        node.plane.apply(_claim("world"))
        for step in self.pods.values():
            for variable in step["spec"]["containers"][1]["env"]:
                node.plane.apply(_secret(variable["valueFrom"]["secretKeyRef"]["name"]))

    def _volume(self, claim: str, folder: Path) -> None:
        spec = {
            "capacity": {"storage": "1Gi"},
            "accessModes": ["ReadWriteMany"],
            "hostPath": {"path": str(folder)},
            "claimRef": {"namespace": "fedemb", "name": claim},
            "storageClassName": "",
        }
        metadata = {"name": f"volume-{claim}"}
        self.node.plane.apply(
            {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": metadata, "spec": spec}
        )

    def step(self, step: str, arguments: list[str], command: list[str] | None = None) -> Ended:
        """Runs the pod of a step with what its container is told in place of a placeholder."""
        subprocess.run(["chown", "-R", f"{USER}:{USER}", self.root], check=True)
        pod = copy.deepcopy(self.pods[step])
        spec = pod["spec"]
        del spec["initContainers"]
        (main,) = [each for each in spec["containers"] if each["name"] == "main"]
        spec["containers"] = [main]
        main["image"], main["imagePullPolicy"] = f"{IMAGE}:0.1.0", "Never"
        main["command"], main["args"] = command or main["command"], arguments
        main["volumeMounts"].append({"name": "world", "mountPath": str(self.root)})
        spec["volumes"].append({"name": "world", "persistentVolumeClaim": {"claimName": "world"}})
        return self.node.run(pod, CONTROLLER)

    def component(self, name: str, out: Path, given: dict[str, Path], **parameters: Any) -> Ended:
        """Runs a step as its compiled container does, with artifacts on the volume."""
        found = declared(name)
        spec = found.component.component_spec
        out.mkdir(parents=True, exist_ok=True)
        told = {
            "inputs": {
                "parameterValues": parameters,
                "artifacts": {
                    item: _artifact(item, spec.inputs[item].type, path)
                    for item, path in given.items()
                },
            },
            "outputs": {
                "artifacts": {
                    item: _artifact(item, spec.outputs[item].type, out / item)
                    for item in found.outputs
                },
                "outputFile": str(out / "executor_output.json"),
            },
        }
        (main,) = [
            each for each in self.pods[found.slug]["spec"]["containers"] if each["name"] == "main"
        ]
        return self.step(
            found.slug, [json.dumps(told) if word == "{{$}}" else word for word in main["args"]]
        )


def _artifact(name: str, kind: str, path: Path) -> dict[str, Any]:
    title, _, version = kind.partition("@")
    shown = {"name": name, "uri": str(path), "metadata": {}}
    return {"artifacts": [{**shown, "type": {"schemaTitle": title, "schemaVersion": version}}]}


def _claim(name: str) -> dict[str, Any]:
    spec = {
        "accessModes": ["ReadWriteMany"],
        "resources": {"requests": {"storage": "1Gi"}},
        "storageClassName": "",
    }
    metadata = {"name": name, "namespace": "fedemb"}
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": metadata,
        "spec": spec,
    }


def _secret(name: str) -> dict[str, Any]:
    metadata = {"name": name, "namespace": "fedemb"}
    data = {"access_key": "nobody", "secret_key": "nothing"}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": data}


@pytest.fixture(scope="module", autouse=True)
def same_code(world):
    """What the image holds is the code whose run it continues."""
    asked = "from fedemb.provenance import privacy_code_digest as d; print(d())"
    ended = world.step("plan-privacy", ["-c", asked], ["python3"])
    assert ended.exit_code == 0, ended.log
    if ended.log.strip() != privacy_code_digest():
        pytest.skip("the image `light` is of another code than this tree; run `make images`")


def test_a_step_writes_to_its_tmp_and_nowhere_else_and_is_nobody(world):
    script = "for f in /opt/fedemb/x /x /var/x /tmp/x; do touch $f && echo $f; done; id -u; env"
    ended = world.step("gate-release", ["-c", script], ["sh"])
    said = ended.log.splitlines()
    assert [line for line in said if line.endswith("/x")] == ["/tmp/x"]
    assert str(USER) in said
    assert sum("Read-only file system" in line for line in said) == 3


def test_a_step_sees_the_keys_of_its_rights_and_no_others(world):
    for step, held in {"gate-release": ["gate"], "account-privacy": ["report"]}.items():
        ended = world.step(step, ["-c", "ls /keys /keys/signing"], ["sh"])
        assert ended.log.split() == ["/keys:", "signing", "/keys/signing:", *held]


def test_the_budget_is_reserved_by_a_pod(world):
    run = world.next
    before = len(run.ledger().state.attempts)
    ended = world.component(
        "reserve_budget",
        world.root / "out" / "reserve",
        {"privacy_plan": run.plan, "pretrained": run.artifacts.pretrained},
        config=run.config.model_dump_json(),
        run_id=run.run_id,
        ledger=run.ledger_uri,
        keys="/keys",
    )
    assert ended.exit_code == 0, ended.log
    ledger = run.ledger()
    ledger.verify()
    assert len(ledger.state.attempts) == before + 1
    reserved = json.loads((world.root / "out" / "reserve" / "reservation").read_text())
    assert (reserved["run_id"], reserved["policy_id"]) == ("tuesday", "weekly")


def _evidence(run: honest_run.HonestRun, step: str) -> dict[str, Path]:
    return {name: getattr(run.context().artifacts, name) for name in declared(step).inputs}


def _judge(world: World, step: str, out: Path, run: honest_run.HonestRun, **instead: Path) -> Ended:
    config = run.config.model_dump_json()
    return world.component(
        step,
        out,
        _evidence(run, step) | instead,
        config=config,
        ledger=run.ledger_uri,
        keys="/keys",
    )


def test_what_ran_is_priced_and_allowed_by_pods(world):
    out = world.root / "out" / "judged"
    ended = _judge(world, "account_privacy", out, world.run)
    assert ended.exit_code == 0, ended.log
    priced, here = (
        json.loads(path.read_text())["accounting"]
        for path in (out / "privacy_report", world.run.report)
    )
    assert priced["epsilon"] == here["epsilon"]
    report = out / "privacy_report"
    ended = _judge(world, "gate_release", out, world.run, privacy_report=report)
    assert ended.exit_code == 0, ended.log
    assert json.loads((out / "verdict").read_text())["allow"] is True
    assert (out / "verdict_page").read_text().startswith("# Allowed\n")
    assert json.loads((out / "executor_output.json").read_text())


def test_a_refused_run_ends_with_its_code_and_the_last_step_shows_why(world):
    run, root = world.run, world.root / "public" / "dp-fedemb" / "monday"
    bent = world.root / "bent.json"
    shutil.copy(run.report, bent)
    run.rewrite(bent, run_id="sunday")
    ended = _judge(world, "gate_release", root / "gate-release" / "7", run, privacy_report=bent)
    assert ended.exit_code == 3, ended.log
    assert '"kind": "step_failed"' in ended.log
    out = root / "show-outcome" / "8"
    status = {
        "state": "FAILED",
        "pipelineJobResourceName": "monday",
        "pipelineTaskName": "run",
        "error": {},
    }
    ended = world.component("show_outcome", out, {}, status=status)
    assert ended.exit_code == 0, ended.log
    assert (out / "outcome").read_text().startswith("# Refused\n")
    metadata = json.loads((out / "executor_output.json").read_text())["artifacts"]["metrics"]
    assert metadata["artifacts"][0]["metadata"]["exit_code"] == 3.0
