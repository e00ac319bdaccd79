"""Writes a run to MLflow, by the kind of its address."""

from __future__ import annotations

from pathlib import Path

from fedemb.errors import InputError
from fedemb.pipelines.run.directory import RunDirectory
from fedemb.pipelines.run.mlflow_files import write_files
from fedemb.pipelines.run.mlflow_run import tracked_run
from fedemb.pipelines.run.mlflow_server import send


def log_run(run: RunDirectory, address: str) -> str:
    """Writes a run to MLflow. Writing it again replaces what the first time wrote.

    Args:
      run: run directory.
      address: `http(s)://` address of a tracking server, or a folder in the layout of MLflow's
        file store.

    Returns: Sentence about where the run is now.

    Raises:
      InputError: the address is of another kind.
      StorageError: folder or server cannot be written.
    """
    tracked = tracked_run(run)
    place = address.removeprefix("mlflow+").rstrip("/")
    if place.startswith(("http://", "https://")):
        send(tracked, place)
    elif "://" in place:
        raise InputError(
            f"MLflow address {place.partition('://')[0]}:// is not supported. Pass a folder or the "
            "http(s):// address of a tracking server."
        )
    else:
        write_files(tracked, Path(place).expanduser().resolve())
    return f"mlflow: {tracked.name} in experiment {tracked.experiment} at {place}"
