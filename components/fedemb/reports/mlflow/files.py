"""Writes a run in the layout of MLflow's file store, without the mlflow package.

    FOLDER/<experiment>/meta.yaml
    FOLDER/<experiment>/<run>/meta.yaml, params/NAME, metrics/NAME, tags/NAME, artifacts/FILE

MLflow reads such a folder as `--backend-store-uri`, and `mlflow migrate-filestore` moves it into a
database. Source: mlflow.store.tracking.file_store of MLflow 3.17.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Mapping
from pathlib import Path

import yaml

from fedemb.errors import StorageError
from fedemb.foundation.files import write_bytes, write_error
from fedemb.reports.mlflow.tracked import TrackedRun

_STATUS = {"RUNNING": 1, "FINISHED": 3, "FAILED": 4}
_LOCAL = 4
"""Source type of a run that was started from a local program."""


def write_files(tracked: TrackedRun, root: Path) -> None:
    """Writes a run below a folder; one with the same id is replaced.

    Raises:
      InputError: the folder is a file.
      StorageError: the disk is full or the folder is not writable.
    """
    experiment = _experiment(tracked, root)
    folder = experiment / tracked.run_id
    if folder.exists():
        try:
            shutil.rmtree(folder)
        except OSError as error:
            raise write_error("the MLflow run cannot be replaced", folder, error) from error
    for name, value in tracked.parameters.items():
        write_bytes(folder / "params" / name, value.encode())
    for name, value in tracked.metrics.items():
        write_bytes(folder / "metrics" / name, f"{tracked.end} {value!r} 0\n".encode())
    for name, value in tracked.tags.items():
        write_bytes(folder / "tags" / name, value.encode())
    for name, data in tracked.artifacts.items():
        write_bytes(folder / "artifacts" / name, data)
    meta = {
        "artifact_uri": (folder / "artifacts").as_uri(),
        "end_time": None if tracked.status == "RUNNING" else tracked.end,
        "entry_point_name": "",
        "experiment_id": experiment.name,
        "lifecycle_stage": "active",
        "run_id": tracked.run_id,
        "run_name": tracked.name,
        "run_uuid": tracked.run_id,
        "source_name": "",
        "source_type": _LOCAL,
        "source_version": "",
        "start_time": tracked.start,
        "status": _STATUS[tracked.status],
        "tags": [],
        "user_id": "fedemb",
    }
    _write_yaml(folder / "meta.yaml", meta)  # last: without it MLflow does not see the run


def _experiment(tracked: TrackedRun, root: Path) -> Path:
    """Returns the folder of the experiment with the run's name, which may be MLflow's own."""
    for meta in sorted(root.glob("*/meta.yaml")):
        try:
            if yaml.safe_load(meta.read_text())["name"] == tracked.experiment:
                return meta.parent
        except (OSError, ValueError, yaml.YAMLError, KeyError, TypeError) as error:
            raise StorageError(
                f"{meta} is not a file of MLflow. Pass an empty folder, or one that MLflow wrote."
            ) from error
    number = int.from_bytes(hashlib.sha256(tracked.experiment.encode()).digest()[:8]) % 10**18
    folder = root / str(number)
    meta = {
        "artifact_location": folder.as_uri(),
        "creation_time": tracked.start,
        "experiment_id": folder.name,
        "last_update_time": tracked.end,
        "lifecycle_stage": "active",
        "name": tracked.experiment,
    }
    _write_yaml(folder / "meta.yaml", meta)
    return folder


def _write_yaml(path: Path, content: Mapping[str, object]) -> None:
    write_bytes(path, yaml.safe_dump(dict(content)).encode())
