"""The copy of a package that one run has: its label, and the outputs of an earlier run.

A task that is not run again is replaced by one importer for each of its artifacts. Nothing is
trusted for being imported: account, gate and release verify signatures and digests of all of it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from fedemb.config import RunConfig
from fedemb.errors import ConfigError, InputError
from fedemb.foundation.canonical_json import JsonObject
from fedemb.pipelines.compile.fields import list_at, object_at, objects_of, text_at
from fedemb.pipelines.compile.rules import (
    component_of,
    dags_of,
    executors_of,
    options_of,
    read_compiled,
)
from fedemb.pipelines.schedules.cluster_objects import ClusterObjects
from fedemb.pipelines.schedules.kubeflow import Kubeflow
from fedemb.pipelines.steps import pipeline_of
from fedemb.runtime.step import Step
from fedemb.storage import open_store

LAST = "gate_release"
"""A release takes its verdict from a gate of the same run, so no run starts after the gate."""
NO_RETRY = {"backoffDuration": "0s", "backoffFactor": 2.0, "backoffMaxDuration": "3600s"}
"""Compiled form of `set_retry(0)`."""
KEY_LABEL = "fedemb.dev/idempotency-key"
"""Label of every pod of a submitted run: `kubectl get pods -l fedemb.dev/idempotency-key=KEY`."""


@dataclass(frozen=True)
class Earlier:
    """Outputs of finished steps that a run reuses."""

    listed: Mapping[str, Sequence[str]]
    """Folder of each run that may hold them, the newest first -> names of its files."""
    found: Mapping[str, Mapping[str, str]]
    """Task of a step -> artifact -> address."""

    @property
    def artifacts(self) -> dict[str, str]:
        """Artifact -> address."""
        return {name: uri for of_step in self.found.values() for name, uri in of_step.items()}


def earlier_outputs(
    kubeflow: Kubeflow, cluster: ClusterObjects, config: RunConfig, run_id: str, start: str
) -> Earlier:
    """Finds the artifacts of the steps of an earlier run before a step, below the public root.

    Kubeflow writes to `<root>/<pipeline>/<run>/<task>/<execution>/<artifact>`. Runs that resumed
    the earlier one may hold newer ones.

    Args:
      kubeflow: namespace of the Kubeflow Pipelines API.
      cluster: Kubernetes objects of the namespace.
      config: configuration of the run; its public root, if null, is that of the namespace.
      run_id: Kubeflow's id of the earlier run.
      start: the step.

    Raises:
      ConfigError: the pipeline has no such step, it is the first or comes after the gate, or the
        public root is not known.
      InputError: an artifact is missing, or two executions of one step wrote it.
      StorageError: Kubeflow or the public root cannot be read.
    """
    pipeline = pipeline_of(config)
    allowed = pipeline.steps[1 : pipeline.steps.index(LAST) + 1]
    if start not in allowed:
        raise ConfigError(
            f"a run cannot be resumed from {start}. Pass --from with one of {', '.join(allowed)}."
        )
    root = config.storage.public_root or cluster.pipeline_root()
    if not root:
        raise ConfigError(
            "the public root of the earlier run is not known: kfp-launcher cannot be read. Set "
            "storage.public_root, or KUBECONFIG."
        )
    runs = [*(run.run_id for run in kubeflow.runs_named(f"(resumes {run_id})")), run_id]
    folders = [f"{root.rstrip('/')}/{pipeline.name}/{run}" for run in runs]
    listed = {folder: open_store(folder).list() for folder in folders}
    before = pipeline.steps[: pipeline.steps.index(start)]
    steps = [step for step in pipeline.declared() if step.name in before]
    return Earlier(listed, {step.slug: _of_step(listed, step) for step in steps})


def _of_step(listed: Mapping[str, Sequence[str]], step: Step) -> dict[str, str]:
    """Artifact -> address, of the newest run that has all artifacts of a step."""
    for folder, names in listed.items():
        places = {name: _executions(names, step.slug, name) for name in step.files}
        for name, found in places.items():
            if len(found) > 1:
                raise InputError(
                    f"{name} of {step.name} was written by {len(found)} executions at {folder}/"
                    f"{step.slug}. Resume the run without --from."
                )
        if all(places.values()):
            return {name: f"{folder}/{found[0]}" for name, found in places.items()}
    raise InputError(
        f"outputs of {step.name} were not found at {', '.join(listed)}. Resume the run without "
        "--from."
    )


def _executions(names: Sequence[str], task: str, artifact: str) -> list[str]:
    pattern = re.compile(rf"({re.escape(task)}/[^/]+/{re.escape(artifact)})(?:/.*)?")
    return sorted({match[1] for name in names if (match := pattern.fullmatch(name))})


def for_run(  # noqa: PLR0917 - what differs from the package
    package: Path,
    folder: Path,
    key: str,
    resume: str | None,
    earlier: Earlier | None,
    texts: Mapping[str, str],
) -> Path:
    """Writes a copy of a checked package for one run.

    Its pods have the key as a label. A run has the id that Kubeflow assigns, so a new submission is
    a new run. With the id of a crashed run, the steps find its reservation and its committed
    rounds; they refuse if code, configuration or data differ.

    Args:
      package: compiled pipeline.
      folder: folder of the copy.
      key: idempotency key of the submission.
      resume: id of the run that is resumed; None: none.
      earlier: outputs of steps that do not run again; None: all run.
      texts: name -> value of the outputs of those steps that are texts.

    Raises:
      ConfigError: the run id is not valid, or the package does not read it from Kubeflow.
    """
    from kfp.dsl import PIPELINE_JOB_ID_PLACEHOLDER

    text = package.read_text()
    if resume is not None:
        if not re.fullmatch(r"[0-9A-Za-z][\w.-]{0,63}", resume):
            raise ConfigError(
                f"{resume!r} is not a run id. Pass a run id from `fedemb ledger show`."
            )
        if f"'{PIPELINE_JOB_ID_PLACEHOLDER}'" not in text:
            raise ConfigError(
                f"Package {package.name} does not read the run id from Kubeflow. Compile the "
                "package again."
            )
        text = text.replace(f"'{PIPELINE_JOB_ID_PLACEHOLDER}'", f"'{resume}'")
    copy = folder / package.name
    copy.write_text(text)
    spec, platform = read_compiled(copy)
    for name, executor in executors_of(spec).items():
        if "container" in executor:
            metadata = object_at(options_of(platform)[name]).setdefault("podMetadata", {})
            object_at(object_at(metadata).setdefault("labels", {}))[KEY_LABEL] = key
    if earlier is not None:
        _take_over(spec, platform, earlier, texts)
    copy.write_text(yaml.safe_dump_all([spec, platform], sort_keys=True))
    return copy


def _take_over(
    spec: JsonObject, platform: JsonObject, earlier: Earlier, texts: Mapping[str, str]
) -> None:
    """Replaces steps by importers of their outputs, and texts by their values."""
    found = earlier.found
    for tasks in dags_of(spec):
        for _, task in objects_of(tasks):  # tells the exit step where the documents are
            if given := object_at(task, "inputs", "parameters", "reused"):
                reused = json.dumps(earlier.artifacts, sort_keys=True)
                given["runtimeValue"] = {"constant": reused}
    tasks = next(dag for dag in dags_of(spec) if found.keys() <= dag.keys())
    kinds = {slug: _outputs(spec, object_at(tasks, slug)) for slug in found}
    for slug in found:
        component = object_at(spec, "components").pop(
            text_at(tasks.pop(slug), "componentRef", "name")
        )
        executor = text_at(component, "executorLabel")
        del object_at(spec, "deploymentSpec", "executors")[executor]
        options_of(platform).pop(executor, None)
    for _, task in list(objects_of(tasks)):
        for value in object_at(task, "inputs", "parameters").values():
            source = object_at(value, "taskOutputParameter")
            if source.get("producerTask") in found:
                constant = texts[text_at(source, "outputParameterKey")]
                object_at(value).clear()
                object_at(value)["runtimeValue"] = {"constant": constant}
        for value in object_at(task, "inputs", "artifacts").values():
            source = object_at(value, "taskOutputArtifact")
            slug, artifact = text_at(source, "producerTask"), text_at(source, "outputArtifactKey")
            if slug in found:
                name = f"import-{slug}-{artifact}".replace("_", "-")
                source |= {"producerTask": name, "outputArtifactKey": "artifact"}
                kind = object_at(kinds[slug], artifact, "artifactType")
                _add_importer(spec, tasks, name, found[slug][artifact], kind)
        _rewire(task, {*found})


def _outputs(spec: JsonObject, task: JsonObject) -> JsonObject:
    return object_at(component_of(spec, task), "outputDefinitions", "artifacts")


def _rewire(task: JsonObject, gone: set[str]) -> None:
    """Makes a task wait for what it takes now."""
    taken = object_at(task, "inputs", "artifacts").values()
    waits = {text_at(value, "taskOutputArtifact", "producerTask") for value in taken}
    waits |= {str(name) for name in list_at(task, "dependentTasks")} - gone
    task.pop("dependentTasks", None)
    if waits:
        task["dependentTasks"] = [*sorted(waits)]


def _add_importer(
    spec: JsonObject, tasks: JsonObject, name: str, uri: str, kind: JsonObject
) -> None:
    """Adds what the compiler makes of `dsl.importer(uri, kind, reimport=True)`."""
    plain: JsonObject = {key: kind[key] for key in ("schemaTitle", "schemaVersion")}
    object_at(spec, "components")[f"comp-{name}"] = {
        "executorLabel": f"exec-{name}",
        "inputDefinitions": {"parameters": {"uri": {"parameterType": "STRING"}}},
        "outputDefinitions": {"artifacts": {"artifact": {"artifactType": plain}}},
    }
    object_at(spec, "deploymentSpec", "executors")[f"exec-{name}"] = {
        "importer": {"artifactUri": {"constant": uri}, "reimport": True, "typeSchema": plain}
    }
    tasks[name] = {
        "cachingOptions": {},
        "componentRef": {"name": f"comp-{name}"},
        "inputs": {"parameters": {"uri": {"runtimeValue": {"constant": uri}}}},
        "retryPolicy": {**NO_RETRY},
        "taskInfo": {"name": name},
    }
