"""Writes a run to a tracking server of MLflow: public values only.

The settings of a bundle, the figures of the reports, the durations of the steps, and the reports
themselves. Nothing else of a run is read.
"""

from __future__ import annotations

import json
import os
import re
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Literal

from fedemb.config import RunConfig
from fedemb.documents.privacy_report import PrivacyReport
from fedemb.errors import InputError, StorageError
from fedemb.foundation.addresses import in_time, redacted
from fedemb.foundation.canonical_json import Json
from fedemb.foundation.environment import require_modules
from fedemb.reports.headline import Documents, Headline, RunFacts
from fedemb.reports.privacy_text import guarantee_sentence

if TYPE_CHECKING:
    from mlflow import MlflowClient

_RUNS = uuid.UUID("6b1d4d0e-58a0-5b0f-9b0a-3f0c5d6a7e21")
_NOT_IN_NAMES = re.compile(r"[^\w.-]")
"""Characters that a name of MLflow, which is also a file name, must not have."""
LONGEST = 6000
"""Maximum characters of a parameter or tag in MLflow."""


@dataclass(frozen=True)
class TrackedRun:
    """Public content of a run."""

    name: str
    headline: Headline
    config: RunConfig
    documents: Documents
    """Output of a step -> a public document; None: not known, or its signature is not valid."""
    pages: Mapping[str, bytes] = field(default_factory=dict)
    """File name -> content of a public page."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Step -> duration."""
    signatures: Literal["checked", "not checked"] = "checked"
    """Whether the signatures of the documents were checked by the process that read them."""

    @property
    def report(self) -> PrivacyReport | None:
        """Returns the privacy report."""
        document = self.documents.get("privacy_report")
        return document and document.body

    @property
    def artifacts(self) -> dict[str, bytes]:
        """Returns file name -> content of every public document and page."""
        documents = {f"{name}.json": item.data for name, item in self.documents.items() if item}
        return {**documents, **self.pages}

    def metrics(self) -> dict[str, float]:
        """Returns the figures of the reports and the durations."""
        return RunFacts.of(self.documents).figures() | {
            f"seconds.{name}": took for name, took in self.seconds.items()
        }

    def tags(self) -> dict[str, str]:
        """Returns how the run ended, and its guarantee."""
        tags = {
            "fedemb.state": self.headline.state,
            "fedemb.headline": self.headline.title,
            "fedemb.run_id": self.name,
            "fedemb.policy_id": self.config.policy.policy_id,
            "fedemb.signatures": self.signatures,
        }
        if self.report is not None:
            tags["fedemb.guarantee"] = guarantee_sentence(self.report.guarantee)
            tags["fedemb.model_sha"] = self.report.model_sha
        return tags


def settings_of(config: RunConfig) -> dict[str, str]:
    """Returns dotted names of all settings but the stores with their values, no credentials."""

    def leaves(value: Json, *path: str) -> Iterator[tuple[str, str]]:
        if isinstance(value, dict) and value:
            for name, item in value.items():
                yield from leaves(item, *path, name)
        else:
            text = value if isinstance(value, str) else json.dumps(value)
            yield _NOT_IN_NAMES.sub("_", ".".join(path)), redacted(text)[:LONGEST]

    return dict(leaves(config.model_dump(mode="json", exclude={"storage"})))


def client_of(url: str) -> MlflowClient:
    """Returns a client of a server; the environment has its credentials (`MLFLOW_TRACKING_TOKEN`).

    Raises:
      ConfigError: the extra with MLflow's client is not installed.
      InputError: the address is not that of a tracking server.
    """
    if not url.startswith(("http://", "https://")):
        raise InputError(
            f"MLflow address {url.partition('://')[0]} is not supported. Pass the http(s):// "
            "address of a tracking server."
        )
    require_modules("mlflow")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")  # steps have a deadline
    os.environ.setdefault("MLFLOW_ALLOW_HTTP_REDIRECTS", "false")  # a token goes to one server
    from mlflow import MlflowClient

    return MlflowClient(url.rstrip("/"), url.rstrip("/"))


def log_run(run: TrackedRun, url: str) -> str:
    """Writes a run to MLflow, or updates the one with the same tag `fedemb.key`; returns its id.

    Raises:
      ConfigError: the extra with MLflow's client is not installed.
      InputError: the address is of another kind.
      StorageError: the server cannot be reached or refuses.
    """
    client = client_of(url)
    try:
        return _send(run, client)
    except Exception as error:  # MLflow raises many types
        raise StorageError(
            f"The MLflow server at {url} did not take the run: {str(error)[:600]}. Check the "
            "address and MLFLOW_TRACKING_TOKEN, then repeat the command."
        ) from error


def _send(run: TrackedRun, client: MlflowClient) -> str:
    from mlflow.entities import Metric, Param, RunTag

    end = datetime.fromisoformat(run.report.time).timestamp() if run.report else time.time()
    policy_id, experiment = run.config.policy.policy_id, run.config.release_name
    key = ("fedemb.key", uuid.uuid5(_RUNS, f"{policy_id}/{run.name}").hex)
    found = client.get_experiment_by_name(experiment)
    number = found.experiment_id if found else client.create_experiment(experiment)
    known = client.search_runs([number], f"tags.`{key[0]}` = '{key[1]}'")
    start, now = int(1000 * (end - sum(run.seconds.values()))), int(1000 * end)
    made = known[0] if known else client.create_run(number, start, dict([key]), run.name)
    tags = {**run.tags(), "mlflow.note.content": run.headline.sentence()}
    client.log_batch(
        made.info.run_id,
        [Metric(name, value, now, 0) for name, value in run.metrics().items()],
        [Param(name, value) for name, value in settings_of(run.config).items()],
        [RunTag(name, value[:LONGEST]) for name, value in tags.items()],
    )
    for name, data in run.artifacts.items():
        client.log_text(made.info.run_id, data.decode(), name)
    if run.headline.state in ("Waiting for approval", "Running"):
        client.update_run(made.info.run_id, "RUNNING")
    else:
        failed = run.headline.state in ("Refused", "Stopped", "Unknown")
        client.set_terminated(made.info.run_id, "FAILED" if failed else "FINISHED", now)
    return made.info.run_id


def log_in_time(run: TrackedRun, url: str) -> str:
    """Writes a run to MLflow; returns why it was not written, or an empty string. Never raises."""
    return in_time(lambda: log_run(run, url) and None)
