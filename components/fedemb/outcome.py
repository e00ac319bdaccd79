"""How a step ended, kept where Kubeflow keeps nothing: it uploads no output of a step that fails.

Beside the addresses of its outputs, in the public root, such a step leaves `outcome.json` and the
public outputs that it wrote: of a denied run the verdict with all its reasons. The step that runs
at the end finds them there and shows them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fedemb.documents.artifacts import Artifact, Public, canonical_json
from fedemb.storage import open_store

OUTCOME = "outcome.json"


def keep_outcome(
    outputs: Mapping[str, type[Artifact]], values: Mapping[str, Any], outcome: Mapping[str, Any]
) -> None:
    """Keeps how a step failed, and what it may show.

    Args:
      outputs: of its declaration.
      values: the arguments of its component, as KFP passes them; without artifacts of KFP nothing
        is kept.
      outcome: step, error, exit code and message: what its log says too.

    Raises:
      StorageError: the public root cannot be written.
    """
    for name, kind in outputs.items():
        place, _, last = str(getattr(values.get(name), "uri", "")).rpartition("/")
        if not place:
            continue
        store, written = open_store(place), Path(values[name].path)
        if issubclass(kind, Public) and written.is_file() and store.local_root is None:
            store.write(last, written.read_bytes())
        store.write(OUTCOME, canonical_json(dict(outcome)))


def run_folder(uri: str, task: str) -> str:
    """Where all tasks of a run put their outputs: what stands before its own name.

    Args:
      uri: of an output of a task, `<root>/<pipeline>/<run>/<task>/.../<name>`.
      task: name of the task.
    """
    return uri.rpartition(f"/{task}/")[0]


def outcomes(folder: str) -> Iterator[dict[str, Any]]:
    """How the steps of a run failed, as they kept it.

    Raises:
      StorageError: the public root cannot be read.
    """
    store = open_store(folder)
    for name in store.list():
        if name.endswith(f"/{OUTCOME}"):
            yield json.loads(store.read(name))


def newest(folder: str, output: str) -> bytes | None:
    """The output of this name that some task of the run gave or kept; None: there is none.

    Two tasks give `lineage`; the gate's, the later one by name, has all of the earlier one's.

    Raises:
      StorageError: the public root cannot be read.
    """
    store = open_store(folder)
    found = [name for name in store.list() if name.rpartition("/")[2] == output]
    return store.read(found[-1]) if found else None
