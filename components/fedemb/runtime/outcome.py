"""How a step failed, kept where Kubeflow keeps nothing: it uploads no output of a failed step.

Beside the addresses of its outputs, in the public root, such a step leaves `outcome.json` and the
public outputs that it wrote: for a denied run, the verdict with all its reasons. A process that a
later start of the same step superseded leaves none. The step that runs at the end reads them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedemb.documents.artifacts import Artifact, Public
from fedemb.foundation.canonical_json import canonical_json
from fedemb.storage import open_store

OUTCOME = "outcome.json"


def keep_outcome(
    outputs: Mapping[str, type[Artifact]], values: Mapping[str, Any], outcome: Mapping[str, Any]
) -> None:
    """Keeps how a step failed, and the public outputs that it wrote.

    Args:
      outputs: of its declaration.
      values: the arguments of its component, as KFP passes them; without artifacts of KFP nothing
        is kept.
      outcome: step, error, exit code, message and fencing token, as in its log.

    Raises:
      StorageError: the public root cannot be written.
    """
    places: dict[str, list[str]] = {}
    for name, kind in outputs.items():
        place, _, last = str(getattr(values.get(name), "uri", "")).rpartition("/")
        if not place:
            continue
        store, written = open_store(place), Path(values[name].path)
        kept = places.setdefault(place, [])
        if issubclass(kind, Public) and written.is_file():
            kept.append(last)
            if store.local_root is None:
                store.write(last, written.read_bytes())
    for place, kept in places.items():
        open_store(place).write(OUTCOME, canonical_json({**outcome, "kept": kept}))


def run_folder(uri: str, task: str) -> str:
    """Where all tasks of a run put their outputs: what stands before its own name.

    Args:
      uri: of an output of a task, `<root>/<pipeline>/<run>/<task>/.../<name>`.
      task: name of the task.
    """
    return uri.rpartition(f"/{task}/")[0]


def outcomes(folder: str, files: Callable[[str], Sequence[str]]) -> Iterator[dict[str, Any]]:
    """How the steps of a run failed that did not succeed in another start.

    Of several failures of a step, the one with the highest fencing token is returned. A step has
    succeeded where all its files lie together and a failed start did not leave them.

    Args:
      folder: of the run.
      files: step -> names of its outputs that are files.

    Raises:
      StorageError: the public root cannot be read.
    """
    store = open_store(folder)
    names = store.list()
    found: dict[str, tuple[int, dict[str, Any]]] = {}
    kept: dict[str, Sequence[str]] = {}
    for name in names:
        if name.endswith(f"/{OUTCOME}"):
            outcome = json.loads(store.read(name))
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
    """Whether some start of a task left all files, beside those a failed one kept."""
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
