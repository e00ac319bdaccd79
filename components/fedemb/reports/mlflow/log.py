"""Writes a run to a tracking server of MLflow, with MLflow's own client."""

from __future__ import annotations

import os
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from fedemb.errors import FedEmbError, InputError, StorageError
from fedemb.foundation.deadline import in_time
from fedemb.foundation.extras import require_modules
from fedemb.reports.mlflow.tracked import TrackedRun

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mlflow import MlflowClient

SECONDS = 60.0
"""Time limit of `log_in_time`."""


def client_of(url: str) -> MlflowClient:
    """Returns a client of a server; the environment has its credentials (`MLFLOW_TRACKING_TOKEN`).

    Raises:
      ConfigError: the extra with MLflow's client is not installed.
    """
    require_modules("mlflow")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")  # steps have a deadline
    os.environ.setdefault("MLFLOW_ALLOW_HTTP_REDIRECTS", "false")  # a token goes to one server
    from mlflow import MlflowClient

    return MlflowClient(url, url)


def open_run(
    client: MlflowClient, experiment: str, name: str, key: tuple[str, str], start: int
) -> str:
    """Returns the id of the run with a tag in an experiment; both are created if missing."""
    found = client.get_experiment_by_name(experiment)
    number = found.experiment_id if found else client.create_experiment(experiment)
    runs = client.search_runs([number], f"tags.`{key[0]}` = '{key[1]}'")
    run = runs[0] if runs else client.create_run(number, start, dict([key]), name)
    return run.info.run_id


def log_values(
    client: MlflowClient,
    run: str,
    metrics: Mapping[str, float],
    time: int,
    *,
    parameters: Mapping[str, str] | None = None,
    tags: Mapping[str, str] | None = None,
) -> None:
    """Writes metrics, parameters and tags of a run; `time` in milliseconds since 1970."""
    from mlflow.entities import Metric, Param, RunTag

    client.log_batch(
        run,
        [Metric(name, value, time, 0) for name, value in metrics.items()],
        [Param(name, value) for name, value in (parameters or {}).items()],
        [RunTag(name, value) for name, value in (tags or {}).items()],
    )


def log(tracked: TrackedRun, address: str) -> str:
    """Writes a run to MLflow, or updates the one with the same id in the tag `fedemb.key`.

    Args:
      tracked: the run.
      address: `http(s)://` address of a tracking server.

    Returns: Sentence about where the run is now.

    Raises:
      InputError: the address is of another kind.
      ConfigError: the extra with MLflow's client is not installed.
      StorageError: the server cannot be reached or refuses.
    """
    url = address.removeprefix("mlflow+").rstrip("/")
    if not url.startswith(("http://", "https://")):
        raise InputError(
            f"MLflow address {address.partition('://')[0]} is not supported. Pass the http(s):// "
            "address of a tracking server."
        )
    client = client_of(url)
    try:
        _send(tracked, client)
    except Exception as error:  # MLflow raises many types
        raise StorageError(
            f"The MLflow server at {url} did not take the run: {str(error)[:300]}. Check the "
            "address and MLFLOW_TRACKING_TOKEN, then repeat the command."
        ) from error
    return f"mlflow: {tracked.name} in experiment {tracked.experiment} at {url}"


def _send(tracked: TrackedRun, client: MlflowClient) -> None:
    key = ("fedemb.key", tracked.run_id)
    run = open_run(client, tracked.experiment, tracked.name, key, tracked.start)
    log_values(
        *(client, run, tracked.metrics, tracked.end),
        parameters=tracked.parameters,
        tags=tracked.tags,
    )
    with tempfile.TemporaryDirectory() as folder:
        for name, data in tracked.artifacts.items():
            Path(folder, name).write_bytes(data)
        client.log_artifacts(run, folder)
    if tracked.status == "RUNNING":
        client.update_run(run, "RUNNING")
    else:
        client.set_terminated(run, tracked.status, tracked.end)


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
