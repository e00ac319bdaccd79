"""A run as MLflow shows it: parameters, metrics, tags and artifacts, of public values only.

The settings of a bundle, the figures of the reports, the durations of the steps, and the reports
themselves. Nothing else of a run is read.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from fedemb.config import RunConfig
from fedemb.documents.audit import AuditReport
from fedemb.documents.plan import PrivacyPlan
from fedemb.documents.privacy_report import PrivacyReport
from fedemb.documents.utility import AnyUtility
from fedemb.documents.verdict import VerdictDocument
from fedemb.foundation.addresses import redacted
from fedemb.foundation.canonical_json import Json
from fedemb.foundation.document import Written
from fedemb.reports.figures import privacy_figures, utility_figures
from fedemb.reports.headline import Headline, State
from fedemb.reports.privacy_report_words import guarantee_sentence

_RUNS = uuid.UUID("6b1d4d0e-58a0-5b0f-9b0a-3f0c5d6a7e21")
_NOT_IN_NAMES = re.compile(r"[^\w.-]")
"""Characters that a name of MLflow, which is also a file name, must not have."""
LONGEST = 6000
"""Maximum characters of a parameter or tag in MLflow."""
DOCUMENTS = ("privacy_report", "utility_report", "audit_report", "verdict", "privacy_plan")
"""Documents that are written as artifacts; all are public."""
PublicDocument = (
    Written[PrivacyReport]
    | Written[AnyUtility]
    | Written[AuditReport]
    | Written[VerdictDocument]
    | Written[PrivacyPlan]
)
Status = Literal["RUNNING", "FINISHED", "FAILED"]
_STATUS: Mapping[State, Status] = {
    "Released": "FINISHED",
    "Released with a waiver": "FINISHED",
    "Simulation": "FINISHED",
    "Waiting for approval": "RUNNING",
    "Running": "RUNNING",
}
"""State of a headline -> status in MLflow; all others failed."""


@dataclass(frozen=True)
class TrackedRun:
    """What MLflow receives."""

    experiment: str
    name: str
    run_id: str
    """32 hexadecimal digits, the same for the same run of the same policy."""
    status: Status
    start: int
    end: int
    """Milliseconds since 1970."""
    parameters: Mapping[str, str]
    metrics: Mapping[str, float]
    tags: Mapping[str, str]
    artifacts: Mapping[str, bytes]
    """File name -> content."""


@dataclass(frozen=True, kw_only=True)
class RunContent:
    """Public content of a run; None: it has no such document, or its signature is unknown."""

    name: str
    headline: Headline
    config: RunConfig
    report: PrivacyReport | None
    utility: AnyUtility | None
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Step -> duration."""
    documents: Mapping[str, PublicDocument]
    """Name in `DOCUMENTS` -> document."""
    pages: Mapping[str, bytes]
    """Name -> HTML page; a page of a document in `DOCUMENTS` is written only with the document."""
    signatures: Literal["checked", "not checked"]
    """Whether the signatures of the documents were checked by the process that read them."""
    end: float
    """Seconds since 1970."""


def tracked_run(content: RunContent) -> TrackedRun:
    """Returns what MLflow receives of a run."""
    config = content.config
    policy_id = config.policy.policy_id
    tags = _tags(content, policy_id) | {"fedemb.signatures": content.signatures}
    return TrackedRun(
        experiment=config.release_name,
        name=content.name,
        run_id=uuid.uuid5(_RUNS, f"{policy_id}/{content.name}").hex,
        status=_STATUS.get(content.headline.state, "FAILED"),
        start=int(1000 * (content.end - sum(content.seconds.values()))),
        end=int(1000 * content.end),
        parameters={
            _NOT_IN_NAMES.sub("_", name): _short(value)
            for name, value in flat_settings(config).items()
            if not name.startswith("storage.")
        },
        metrics=dict(_metrics(content)),
        tags={name: _short(value) for name, value in tags.items()},
        artifacts=dict(_artifacts(content)),
    )


def flat_settings(config: RunConfig) -> dict[str, str]:
    """Returns dotted names of all settings with their values as text, without credentials."""
    found: dict[str, str] = {}

    def walk(prefix: str, value: Json) -> None:
        if isinstance(value, dict) and value:
            for name, item in value.items():
                walk(f"{prefix}.{name}" if prefix else name, item)
        else:
            found[prefix] = redacted(value if isinstance(value, str) else json.dumps(value))

    walk("", config.model_dump(mode="json"))
    return found


def _metrics(content: RunContent) -> Iterator[tuple[str, float]]:
    gain = content.headline.figures.gain
    if content.report is not None:
        yield from privacy_figures(content.report).items()
    if content.utility is not None:
        yield from utility_figures(content.utility).items()
    if gain is not None:
        yield from (("gain_low", gain.low), ("gain_high", gain.high))
    for step, took in content.seconds.items():
        yield f"seconds.{step}", took


def _tags(content: RunContent, policy_id: str) -> dict[str, str]:
    headline, report = content.headline, content.report
    tags = {
        "mlflow.runName": content.name,
        "mlflow.source.name": "fedemb",
        "mlflow.source.type": "JOB",
        "mlflow.note.content": headline.sentence(),
        "fedemb.state": headline.state,
        "fedemb.headline": headline.title,
        "fedemb.run_id": content.name,
        "fedemb.policy_id": policy_id,
    }
    if report is not None:
        tags["fedemb.guarantee"] = guarantee_sentence(report.guarantee)
        tags["fedemb.model_sha"] = report.model_sha
    return tags


def _artifacts(content: RunContent) -> Iterator[tuple[str, bytes]]:
    for name in DOCUMENTS:
        if name in content.documents:
            yield f"{name}.json", content.documents[name].data
    for name, page in content.pages.items():
        if name in content.documents or name not in DOCUMENTS:
            yield f"{name}.html", page


def _short(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"
