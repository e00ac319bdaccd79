"""Writes a run to MLflow, by the kind of its address."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from fedemb.errors import FedEmbError, InputError
from fedemb.foundation.deadline import in_time
from fedemb.reports.mlflow.files import write_files
from fedemb.reports.mlflow.server import send
from fedemb.reports.mlflow.tracked import TrackedRun

SECONDS = 60.0
"""Time limit of `log_in_time`."""


def log(tracked: TrackedRun, address: str) -> str:
    """Writes a run to MLflow. Writing it again replaces what the first time wrote.

    Args:
      tracked: the run.
      address: `http(s)://` address of a tracking server, or a folder in the layout of MLflow's
        file store.

    Returns: Sentence about where the run is now.

    Raises:
      InputError: the address is of another kind.
      StorageError: folder or server cannot be written.
    """
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


def log_in_time(tracked: TrackedRun, address: str, seconds: float = SECONDS) -> str:
    """Writes a run to MLflow in at most `seconds`, in a thread that cannot keep the process alive.

    Returns: Why the run was not written; empty: it was. Never raises.
    """
    late = f"the server did not take the run within {seconds:g} seconds"
    return in_time(partial(_problem, tracked, address), seconds, late)


def _problem(tracked: TrackedRun, address: str) -> str:
    try:
        log(tracked, address)
    except FedEmbError as error:
        return str(error)
    except Exception as error:  # a bug here does not change how a run ends
        return type(error).__name__
    return ""
