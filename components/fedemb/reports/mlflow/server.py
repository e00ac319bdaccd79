"""Sends a run to an MLflow tracking server by its REST API, without the mlflow package."""

from __future__ import annotations

import base64
import os
from collections.abc import Iterable, Mapping
from urllib.parse import quote, urlencode

from fedemb.errors import StorageError
from fedemb.foundation.canonical_json import Json, JsonFields, ToJson
from fedemb.foundation.http_calls import call_json, list_at, put_bytes, value_at
from fedemb.reports.mlflow.tracked import TrackedRun

_BATCH = 100
"""Maximum number of parameters or tags in one request."""


class MlflowServer:
    """A tracking server, with authentication from MLflow's own variables.

    Every method raises OSError for an error of the server, and ValueError for an unknown response.
    """

    def __init__(self, url: str) -> None:
        self._url, self._headers = url, _headers()

    def call(self, path: str, body: ToJson = None, known: str = "") -> Json:
        """Calls an endpoint; see `call_json`."""
        return call_json(f"{self._url}/api/2.0/mlflow/{path}", self._headers, body, known)

    def experiment(self, name: str) -> str:
        """Returns the id of an experiment, which is created if it does not exist."""
        named = urlencode({"experiment_name": name})
        found = self.call(f"experiments/get-by-name?{named}", known="RESOURCE_DOES_NOT_EXIST")
        if found is None:
            created = self.call("experiments/create", {"name": name})
            return str(value_at(created, "experiment_id"))
        return str(value_at(found, "experiment", "experiment_id"))

    def run(self, experiment: str, ours: str, fields: JsonFields) -> tuple[str, str]:
        """Returns id and artifact address of a run, which is created if it does not exist.

        Args:
          experiment: id of the experiment.
          ours: filter that only this run passes.
          fields: fields of a new run.
        """
        asked = {"experiment_ids": [experiment], "filter": ours}
        runs = list_at(self.call("runs/search", asked), "runs")
        if not runs:
            created = self.call("runs/create", {"experiment_id": experiment, **fields})
            runs = [value_at(created, "run")]
        info = value_at(runs[0], "info")
        return str(value_at(info, "run_id")), str(value_at(info, "artifact_uri"))

    def log_metrics(self, run: str, metrics: Mapping[str, float], time: int) -> None:
        """Writes metrics of a run; `time` in milliseconds since 1970."""
        rows = [
            {"key": key, "value": value, "timestamp": time, "step": 0}
            for key, value in metrics.items()
        ]
        self.call("runs/log-batch", {"run_id": run, "metrics": rows})

    def upload(self, files: Iterable[tuple[str, bytes]], folder: str) -> None:
        """Writes artifacts through the server."""
        root = f"{self._url}/api/2.0/mlflow-artifacts/artifacts/{folder}"
        for name, data in files:
            put_bytes(f"{root}/{quote(name)}", self._headers, data)


def send(tracked: TrackedRun, url: str) -> None:
    """Creates a run, or updates the one with the same id in the tag `fedemb.key`.

    Artifacts are sent if the server stores them (`mlflow-artifacts:`); otherwise the tag
    `fedemb.artifacts` says that they are missing.

    Raises:
      StorageError: the server cannot be reached or refuses.
    """
    try:
        _send(tracked, MlflowServer(url))
    except (OSError, ValueError) as error:
        raise StorageError(
            f"The MLflow server at {url} did not take the run: {error}. Check the address and "
            "MLFLOW_TRACKING_TOKEN, then repeat the command."
        ) from error


def _send(tracked: TrackedRun, server: MlflowServer) -> None:
    fields = {
        "run_name": tracked.name,
        "start_time": tracked.start,
        "tags": pairs({"fedemb.key": tracked.run_id}),
    }
    ours = f"tags.`fedemb.key` = '{tracked.run_id}'"
    run, address = server.run(server.experiment(tracked.experiment), ours, fields)
    stores = address.startswith("mlflow-artifacts:")
    tags = {**tracked.tags, "fedemb.artifacts": "stored" if stores else "not stored: no proxy"}
    server.log_metrics(run, tracked.metrics, tracked.end)
    for kind, values in (("params", pairs(tracked.parameters)), ("tags", pairs(tags))):
        for start in range(0, len(values), _BATCH):
            server.call("runs/log-batch", {"run_id": run, kind: values[start : start + _BATCH]})
    if stores:
        server.upload(tracked.artifacts.items(), address.partition(":")[2].lstrip("/"))
    ended = {} if tracked.status == "RUNNING" else {"end_time": tracked.end}
    server.call("runs/update", {"run_id": run, "status": tracked.status, **ended})


def pairs(values: Mapping[str, str]) -> list[dict[str, str]]:
    """Returns parameters or tags in the form of the API."""
    return [{"key": key, "value": value} for key, value in values.items()]


def _headers() -> dict[str, str]:
    variable = os.environ.get
    if token := variable("MLFLOW_TRACKING_TOKEN"):
        return {"Authorization": f"Bearer {token}"}
    if name := variable("MLFLOW_TRACKING_USERNAME"):
        word = f"{name}:{variable('MLFLOW_TRACKING_PASSWORD', '')}".encode()
        return {"Authorization": f"Basic {base64.b64encode(word).decode()}"}
    return {}
