"""A run whose folders are volumes of a node, and the pods of its compiled pipeline."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from conftest import CONTROLLER, INFRA
from node import Ended, Node
from pods import compiled

from fedemb.config import RunConfig
from fedemb.pipelines.graph import Pipeline, pipeline_arguments
from fedemb.pipelines.steps import all_steps, key_claims
from fedemb.runtime.step import Step, declared
from tests.conftest import REPOSITORY
from tests.kit.pipeline_runs import honest_run

EXIT = {"mlflow": "", "reused": "{}"}
"""Parameters of the exit step that do not belong to a configuration."""
USER = 65532
"""Of the images."""
IMAGE = "localhost/fedemb-light:0.1.0"
PYTHON, TREE = Path("/opt/python"), Path("/opt/tree")
INSTALLED = {"python": (Path(sys.base_prefix), PYTHON), "tree": (REPOSITORY, TREE)}
"""Claim -> folder here, and where it is in a pod: this checkout and its environment."""
AS_INSTALLED = {
    "PATH": f"{PYTHON}/bin:/usr/bin:/bin",
    "LD_LIBRARY_PATH": f"{PYTHON}/lib",
    "PYTHONPATH": f"{TREE}/components:{TREE}/.venv/lib/python3.11/site-packages",
}


class World:
    """A run on volumes that belong to the user of the images."""

    def __init__(self, node: Node, root: Path) -> None:
        self.node, self.root = node, root
        root.chmod(0o755)
        self.pods = compiled(root, "cpu", INFRA / "profiles" / "s3.yaml")
        self.run = honest_run.start(root / "monday").until_gate()
        keys = Path(self.run.keys_uri)
        held = {
            claim: keys / folder
            for step in all_steps().values()
            for claim, folder in key_claims(step.rights).items()
        }
        for folder in held.values():
            folder.mkdir(parents=True, exist_ok=True)
        installed = {claim: folder for claim, (folder, _) in INSTALLED.items()}
        for claim, folder in {"world": root, **installed, **held}.items():
            self._volume(claim, folder)
        node.plane.apply(*map(_claim, ("world", *INSTALLED)))
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

    def step(
        self,
        step: str,
        arguments: list[str],
        command: list[str] | None = None,
        *,
        installed: bool = False,
    ) -> Ended:
        """Runs the pod of a step; values for its container replace the placeholders.

        Args:
          step: its name as Kubeflow spells it.
          arguments: of its container.
          command: instead of its own.
          installed: gives the pod the environment of this checkout, on volumes no one writes to.
        """
        subprocess.run(["chown", "-R", f"{USER}:{USER}", self.root], check=True)
        pod = copy.deepcopy(self.pods[step])
        spec = pod["spec"]
        del spec["initContainers"]
        (main,) = [each for each in spec["containers"] if each["name"] == "main"]
        spec["containers"] = [main]
        main["image"], main["imagePullPolicy"] = IMAGE, "Never"
        del main["resources"]  # more than this node has; tests of admission hold them to the quota
        main["command"], main["args"] = command or main["command"], arguments
        mounts = {"world": self.root}
        if installed:
            mounts |= {claim: place for claim, (_, place) in INSTALLED.items()}
            main["env"] += [{"name": name, "value": text} for name, text in AS_INSTALLED.items()]
        for claim, place in mounts.items():
            mount = {"name": claim, "mountPath": str(place), "readOnly": claim in INSTALLED}
            main["volumeMounts"].append(mount)
            spec["volumes"].append({"name": claim, "persistentVolumeClaim": {"claimName": claim}})
        return self.node.run(pod, CONTROLLER)

    def component(self, name: str, out: Path, given: dict[str, Path], **parameters: Any) -> Ended:
        """Runs a step as its compiled container does, with artifacts on the volume.

        A step of another image than `light` gets the environment of this checkout.
        """
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
                "parameters": {name: {"outputFile": str(out / name)} for name in found.texts},
                "artifacts": {
                    item: _artifact(item, spec.outputs[item].type, out / item)
                    for item in found.outputs
                    if item not in found.texts
                },
                "outputFile": str(out / "executor_output.json"),
            },
        }
        (main,) = [
            each for each in self.pods[found.slug]["spec"]["containers"] if each["name"] == "main"
        ]
        arguments = [json.dumps(told) if word == "{{$}}" else word for word in main["args"]]
        return self.step(found.slug, arguments, installed=found.image != "light")


class PodRun:
    """A run of a pipeline: every step the pod of its compiled container, fed by those before it.

    Args:
      world: the volumes.
      pipeline: which steps, in which order.
      config: of the run, with its sources on the volume.
      run_id: its name.
    """

    def __init__(self, world: World, pipeline: Pipeline, config: RunConfig, run_id: str) -> None:
        self.world, self.pipeline, self.run_id = world, pipeline, run_id
        self.root = world.root / "public" / pipeline.name / run_id
        self.ledger = str(world.run.ledger_uri)
        private, releases = (str(world.root / run_id / name) for name in ("private", "releases"))
        given = pipeline_arguments(
            config, private_root=private, ledger=self.ledger, keys="/keys", releases=releases
        )
        self.given: dict[str, Any] = {**EXIT, **given, "run_id": run_id}

    def folder(self, step: Step) -> Path:
        """Where Kubeflow would put what a step gives."""
        return self.root / step.slug / "1"

    def do(self, step: Step) -> Ended:
        """Runs the next step."""
        producers = self.pipeline.producers()[step.name]
        given = {name: self.folder(declared(producers[name])) / name for name in step.inputs}
        parameters = {name: self.given[name] for name in step.parameters}
        ended = self.world.component(step.name, self.folder(step), given, **parameters)
        for name in step.texts:
            self.given[name] = (self.folder(step) / name).read_text()
        return ended

    def end(self, state: str) -> Ended:
        """Runs the step at the exit, told how the others ended."""
        status = {"state": state, "pipelineJobResourceName": self.run_id, "error": {}}
        status["pipelineTaskName"] = "run"
        step = declared(self.pipeline.at_exit)
        parameters = {name: self.given[name] for name in step.parameters}
        return self.world.component(step.name, self.folder(step), {}, status=status, **parameters)


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
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata, "spec": spec}


def _secret(name: str) -> dict[str, Any]:
    metadata = {"name": name, "namespace": "fedemb"}
    data = {"access_key": "unknown", "secret_key": "nothing"}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": data}
