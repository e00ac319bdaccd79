"""Sends a run to an MLflow tracking server by its REST API, without the mlflow package."""

from __future__ import annotations

import base64
import os
from typing import Any
from urllib.parse import quote

from fedemb.errors import StorageError
from fedemb.foundation.http_calls import call_json, put_bytes
from fedemb.reports.mlflow.tracked import TrackedRun

_BATCH = 100
"""Maximum number of parameters or tags in one request."""


def send(tracked: TrackedRun, url: str) -> None:
    """Creates a run, or updates the one with the same id in the tag `fedemb.key`.

    Artifacts are sent if the server stores them (`mlflow-artifacts:`); otherwise the tag
    `fedemb.artifacts` says that they are missing.

    Raises:
      StorageError: the server cannot be reached or refuses.
    """
    try:
        _send(tracked, url)
    except (OSError, ValueError) as error:
        raise StorageError(
            f"The MLflow server at {url} did not take the run: {error}. Check the address and "
            "MLFLOW_TRACKING_TOKEN, then repeat the command."
        ) from error


def _send(tracked: TrackedRun, url: str) -> None:
    api, headers = f"{url}/api/2.0/mlflow", mlflow_headers()

    def call(path: str, body: Any = None, known: str = "") -> Any:
        return call_json(f"{api}/{path}", headers, body, known)

    name = quote(tracked.experiment)
    found = call(f"experiments/get-by-name?experiment_name={name}", known="RESOURCE_DOES_NOT_EXIST")
    experiment = (
        found["experiment"]["experiment_id"]
        if found
        else call("experiments/create", {"name": tracked.experiment})["experiment_id"]
    )
    ours = f"tags.`fedemb.key` = '{tracked.run_id}'"
    known = call("runs/search", {"experiment_ids": [experiment], "filter": ours}).get("runs")
    if known:
        info = known[0]["info"]
    else:
        tags = [{"key": "fedemb.key", "value": tracked.run_id}]
        fields = {"run_name": tracked.name, "start_time": tracked.start, "tags": tags}
        info = call("runs/create", {"experiment_id": experiment, **fields})["run"]["info"]
    run = info["run_id"]
    stores = str(info["artifact_uri"]).startswith("mlflow-artifacts:")
    tags = {**tracked.tags, "fedemb.artifacts": "stored" if stores else "not stored: no proxy"}
    metrics = [
        {"key": key, "value": value, "timestamp": tracked.end, "step": 0}
        for key, value in tracked.metrics.items()
    ]
    call("runs/log-batch", {"run_id": run, "metrics": metrics})
    for kind, values in (("params", tracked.parameters), ("tags", tags)):
        pairs = [{"key": key, "value": value} for key, value in values.items()]
        for start in range(0, len(pairs), _BATCH):
            call("runs/log-batch", {"run_id": run, kind: pairs[start : start + _BATCH]})
    for file, data in tracked.artifacts.items() if stores else ():
        folder = str(info["artifact_uri"]).partition(":")[2].lstrip("/")
        put_bytes(f"{url}/api/2.0/mlflow-artifacts/artifacts/{folder}/{quote(file)}", headers, data)
    ended = {} if tracked.status == "RUNNING" else {"end_time": tracked.end}
    call("runs/update", {"run_id": run, "status": tracked.status, **ended})


def mlflow_headers() -> dict[str, str]:
    """Returns authentication headers from MLflow's own variables."""
    variable = os.environ.get
    if token := variable("MLFLOW_TRACKING_TOKEN"):
        return {"Authorization": f"Bearer {token}"}
    if name := variable("MLFLOW_TRACKING_USERNAME"):
        word = f"{name}:{variable('MLFLOW_TRACKING_PASSWORD', '')}".encode()
        return {"Authorization": f"Basic {base64.b64encode(word).decode()}"}
    return {}
