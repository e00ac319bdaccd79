"""Resumes a run from a step: the outputs of earlier steps are imported and not made again.

A task that is not run again is replaced by one importer for each of its artifacts. Nothing is
trusted for being imported: account, gate and release verify signatures and digests of all of it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from fedemb.documents.artifacts import Noised, Public
from fedemb.errors import ConfigError, InputError
from fedemb.foundation.canonical_json import JsonObject
from fedemb.pipelines.compile.fields import list_at, object_at, objects_of, text_at
from fedemb.pipelines.compile.rules import (
    RULES,
    component_of,
    dags_of,
    no_raw_outputs,
    options_of,
    read_compiled,
)
from fedemb.pipelines.graph import Pipeline
from fedemb.runtime.step import Step
from fedemb.storage import open_store

LAST = "gate_release"
"""A release takes its verdict from a gate of the same run, so no run starts after the gate."""
NO_RETRY = {"backoffDuration": "0s", "backoffFactor": 2.0, "backoffMaxDuration": "3600s"}
"""Compiled form of `set_retry(0)`."""
Addresses = Mapping[str, Mapping[str, str]]
"""Step -> artifact -> address."""


def finished_before(pipeline: Pipeline, start: str) -> list[Step]:
    """Returns the steps before a step.

    Raises:
      ConfigError: the pipeline has no such step, or it is the first, or comes after the gate.
    """
    allowed = pipeline.steps[1 : pipeline.steps.index(LAST) + 1]
    if start not in allowed:
        raise ConfigError(
            f"a run cannot be resumed from {start}. Pass --from with one of {', '.join(allowed)}."
        )
    before = pipeline.steps[: pipeline.steps.index(start)]
    return [step for step in pipeline.declared() if step.name in before]


def addresses(root: str, runs: Sequence[str], steps: Sequence[Step]) -> Addresses:
    """Finds the artifacts of finished steps below the public root.

    Args:
      root: `<public root>/<pipeline>`; Kubeflow writes to `<run>/<task>/<execution>/<artifact>`.
      runs: Kubeflow's ids of the runs that may hold them, the newest first.
      steps: the steps.

    Raises:
      InputError: an artifact is missing, or two executions of one step wrote it.
      StorageError: the public root cannot be read.
    """
    listed = {run: open_store(f"{root}/{run}").list() for run in runs}
    return {step.name: _of_step(root, listed, step) for step in steps}


def _of_step(root: str, listed: Mapping[str, Sequence[str]], step: Step) -> dict[str, str]:
    """Artifact -> address, of the newest run that has all artifacts of a step."""
    for run, names in listed.items():
        places = {name: _executions(names, step.slug, name) for name in step.files}
        for name, found in places.items():
            if len(found) > 1:
                raise InputError(
                    f"{name} of {step.name} was written by {len(found)} executions at {root}/{run}/"
                    f"{step.slug}. Resume the run without --from."
                )
        if all(places.values()):
            return {name: f"{root}/{run}/{found[0]}" for name, found in places.items()}
    raise InputError(
        f"outputs of {step.name} were not found at {root}/{{{','.join(listed)}}}. Resume the run "
        "without --from."
    )


def _executions(names: Sequence[str], task: str, artifact: str) -> list[str]:
    pattern = re.compile(rf"({re.escape(task)}/[^/]+/{re.escape(artifact)})(?:/.*)?")
    return sorted({match[1] for name in names if (match := pattern.fullmatch(name))})


def taken_over(
    package: Path, steps: Sequence[Step], found: Addresses, texts: Mapping[str, str], folder: Path
) -> Path:
    """Writes a copy of a package in which steps are replaced by importers of their outputs.

    Args:
      package: compiled pipeline, with the id of the run in it.
      steps: the steps that do not run again.
      found: addresses of their artifacts.
      texts: name -> value of their outputs that are texts.
      folder: folder of the copy.

    Raises:
      ConfigError: the result breaks a rule of compilation.
    """
    spec, platform = read_compiled(package)
    _name_reused(spec, {name: uri for of in found.values() for name, uri in of.items()})
    tasks = next(dag for dag in dags_of(spec) if all(step.slug in dag for step in steps))
    slugs = {step.slug for step in steps}
    kinds = {slug: _outputs(spec, object_at(tasks, slug)) for slug in slugs}
    for slug in slugs:
        _remove(spec, platform, object_at(tasks.pop(slug)))
    imported: dict[str, tuple[str, str]] = {}
    for _, task in objects_of(tasks):
        for value in object_at(task, "inputs", "parameters").values():
            source = object_at(value, "taskOutputParameter")
            if source.get("producerTask") in slugs:
                constant = texts[text_at(source, "outputParameterKey")]
                object_at(value).clear()
                object_at(value)["runtimeValue"] = {"constant": constant}
        for value in object_at(task, "inputs", "artifacts").values():
            source = object_at(value, "taskOutputArtifact")
            slug, artifact = text_at(source, "producerTask"), text_at(source, "outputArtifactKey")
            if slug in slugs:
                name = f"import-{slug}-{artifact}".replace("_", "-")
                imported[name] = (slug, artifact)
                source |= {"producerTask": name, "outputArtifactKey": "artifact"}
        _rewire(task, slugs)
    for name, (slug, artifact) in imported.items():
        uri = found[slug.replace("-", "_")][artifact]
        _add_importer(spec, tasks, name, uri, object_at(kinds[slug], artifact, "artifactType"))
    _check(spec, platform, package, steps, imported)
    copy = folder / f"from-{package.name}"
    copy.write_text(yaml.safe_dump_all([spec, platform], sort_keys=True))
    return copy


def _name_reused(spec: JsonObject, found: Mapping[str, str]) -> None:
    """Tells the exit step where the documents of earlier steps are."""
    for tasks in dags_of(spec):
        for _, task in objects_of(tasks):
            if given := object_at(task, "inputs", "parameters", "reused"):
                given["runtimeValue"] = {"constant": json.dumps(dict(found), sort_keys=True)}


def _remove(spec: JsonObject, platform: JsonObject, task: JsonObject) -> None:
    """Removes the component and the executor of a task."""
    component = object_at(spec, "components").pop(text_at(task, "componentRef", "name"))
    executor = text_at(component, "executorLabel")
    del object_at(spec, "deploymentSpec", "executors")[executor]
    options_of(platform).pop(executor, None)


def _check(
    spec: JsonObject,
    platform: JsonObject,
    package: Path,
    steps: Sequence[Step],
    imported: Mapping[str, tuple[str, str]],
) -> None:
    """Holds the result against every rule of compilation.

    An importer is not a step, so the kind of its output is that in the step's declaration.
    """
    kinds = {step.slug: step.outputs for step in steps}
    raw = [
        f"{name} imports {artifact} of {slug}, which is not known to be free of Raw"
        for name, (slug, artifact) in imported.items()
        if not issubclass(kinds[slug][artifact], Noised | Public)
    ]
    components = object_at(spec, "components").items()
    ours = {name: item for name, item in components if name[5:] not in imported}
    without: JsonObject = {**spec, "components": ours}
    broken = [
        problem
        for rule in RULES
        for problem in rule(without if rule is no_raw_outputs else spec, platform)
    ]
    if problems := [*raw, *broken]:
        raise ConfigError(
            f"Package {package.name} breaks a rule: {problems[0]}. Compile the package again."
        )


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
