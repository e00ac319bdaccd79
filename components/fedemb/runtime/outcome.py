"""Stores how a step failed, because Kubeflow uploads no output of a failed step.

A failed step writes `outcome.json` and its public outputs next to its output addresses in the
public root. For a denied run, the outputs include the verdict with all reasons. A process that a
later start of the same step superseded writes no outcome. The exit step reads the outcomes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NotRequired, Protocol, TypedDict, cast, runtime_checkable

from fedemb.documents.artifacts import Artifact, Public
from fedemb.foundation.canonical_json import ToJson, canonical_json
from fedemb.storage import open_store

OUTCOME = "outcome.json"


@runtime_checkable
class KfpArtifact(Protocol):
    """Artifact of a component, as KFP passes it."""

    @property
    def path(self) -> str:
        """Local path."""
        ...


class StepFailure(TypedDict):
    """How a step failed."""

    step: str
    error: str
    """Name of the error's class."""
    exit_code: int
    message: str
    fencing_token: NotRequired[int | None]
    kept: NotRequired[list[str]]
    """Outputs that the step wrote before it failed."""


def keep_outcome(
    outputs: Mapping[str, type[Artifact]],
    values: Mapping[str, object],
    outcome: Mapping[str, ToJson],
) -> None:
    """Stores the failure of a step, and the public outputs that the step wrote.

    Args:
      outputs: outputs of the step's declaration.
      values: arguments of the step's component, as KFP passes them; without KFP artifacts, nothing
          is stored.
      outcome: step, error, exit code, message and fencing token, as in the step's log.

    Raises:
      StorageError: the public root cannot be written.
    """
    places: dict[str, list[str]] = {}
    for name, kind in outputs.items():
        value = values.get(name)
        place, _, last = str(getattr(value, "uri", "")).rpartition("/")
        if not place or not isinstance(value, KfpArtifact):
            continue
        store, written = open_store(place), Path(value.path)
        kept = places.setdefault(place, [])
        if issubclass(kind, Public) and written.is_file():
            kept.append(last)
            if store.local_root is None:
                store.write(last, written.read_bytes())
    for place, kept in places.items():
        open_store(place).write(OUTCOME, canonical_json({**outcome, "kept": kept}))


def run_folder(uri: str, task: str) -> str:
    """Returns the folder of all task outputs of a run: the address up to the task name.

    Args:
      uri: address of a task output, `<root>/<pipeline>/<run>/<task>/.../<name>`.
      task: name of the task.
    """
    return uri.rpartition(f"/{task}/")[0]


def outcomes(folder: str, files: Callable[[str], Sequence[str]]) -> Iterator[StepFailure]:
    """Yields the failures of a run's steps that did not succeed in another start.

    If a step failed several times, the failure with the highest fencing token is returned. A step
    succeeded if all of its files are in one folder and were not written by a failed start.

    Args:
      folder: folder of the run.
      files: step -> names of its outputs that are files.

    Raises:
      StorageError: the public root cannot be read.
    """
    store = open_store(folder)
    names = store.list()
    found: dict[str, tuple[int, StepFailure]] = {}
    kept: dict[str, Sequence[str]] = {}
    for name in names:
        if name.endswith(f"/{OUTCOME}"):
            outcome = cast("StepFailure", json.loads(store.read(name)))
            kept[name.removesuffix(f"/{OUTCOME}")] = outcome.get("kept", ())
            token = int(outcome.get("fencing_token") or 0)
            step = str(outcome["step"])
            if step not in found or token >= found[step][0]:
                found[step] = token, outcome
    for step, (_, outcome) in found.items():
        if not _succeeded(names, kept, step.replace("_", "-"), files(step)):
            yield outcome


def _succeeded(
    names: Sequence[str], kept: Mapping[str, Sequence[str]], task: str, files: Sequence[str]
) -> bool:
    """Returns whether some start of a task wrote all files, excluding files of failed starts."""
    places: dict[str, set[str]] = {}
    for name in names:
        if not name.startswith(f"{task}/"):
            continue
        for file in files:
            place, found, _ = f"{name}/".rpartition(f"/{file}/")
            if found:
                places.setdefault(place, set()).add(file)
    return bool(files) and any(
        left >= set(files) and not left <= set(kept.get(place, ()))
        for place, left in places.items()
    )
