"""A run as MLflow shows it: parameters, metrics, tags and artifacts, of public values only.

The settings of a bundle, the figures of the reports, the durations of the steps, and the reports
themselves, each with a signature that holds. Nothing else of a run directory is read.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from fedemb.pipelines.run.compare import compared_run
from fedemb.pipelines.run.directory import RunDirectory
from fedemb.pipelines.run.headline import readable
from fedemb.pipelines.run.report_pages import PAGES
from fedemb.pipelines.run.signed import (
    signed_audit,
    signed_plan,
    signed_report,
    signed_utility,
    signed_verdict,
)
from fedemb.reports.comparison import ComparedRun, flat_settings
from fedemb.reports.figures import privacy_figures, utility_figures
from fedemb.reports.headline import State
from fedemb.reports.privacy_report_words import guarantee_sentence

_RUNS = uuid.UUID("6b1d4d0e-58a0-5b0f-9b0a-3f0c5d6a7e21")
_NOT_IN_NAMES = re.compile(r"[^\w.-]")
"""Characters that a name of MLflow, which is also a file name, must not have."""
LONGEST = 6000
"""Maximum characters of a parameter or tag in MLflow."""
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


def tracked_run(run: RunDirectory) -> TrackedRun:
    """Returns the public content of a run.

    Raises:
      ArtifactError: the configuration or the state of the run is damaged.
    """
    found, config = compared_run(run), run.config()
    seconds = sum(found.seconds.values())
    time = found.report.time if found.report else None
    end = datetime.fromisoformat(time).timestamp() if time else _written(run)
    headline = found.headline
    return TrackedRun(
        experiment=config.release_name,
        name=run.run_id,
        run_id=uuid.uuid5(_RUNS, f"{config.policy.policy_id}/{run.run_id}").hex,
        status=_STATUS.get(headline.state, "FAILED"),
        start=int(1000 * (end - seconds)),
        end=int(1000 * end),
        parameters={
            _NOT_IN_NAMES.sub("_", name): _short(value)
            for name, value in flat_settings(config).items()
            if not name.startswith("storage.")
        },
        metrics=dict(_metrics(run, found)),
        tags={name: _short(value) for name, value in _tags(found, config.policy.policy_id).items()},
        artifacts=dict(_artifacts(run)),
    )


def _written(run: RunDirectory) -> float:
    """Time at which the state of the run was written last."""
    state = run.root / "state.json"
    return (state if state.exists() else run.root / "config.yaml").stat().st_mtime


def _metrics(run: RunDirectory, found: ComparedRun) -> Iterator[tuple[str, float]]:
    report, utility = (
        readable(lambda: signed_report(run)),
        readable(lambda: signed_utility(run)),
    )
    if report is not None:
        yield from privacy_figures(report.json).items()
    if utility is not None:
        yield from utility_figures(utility.json).items()
    gain = found.headline.figures.gain
    if gain is not None:
        yield from (("gain_low", gain.low), ("gain_high", gain.high))
    for step, took in found.seconds.items():
        yield f"seconds.{step}", took


def _tags(found: ComparedRun, policy_id: str) -> dict[str, str]:
    headline, report = found.headline, found.report
    tags = {
        "mlflow.runName": found.name,
        "mlflow.source.name": "fedemb",
        "mlflow.source.type": "JOB",
        "mlflow.note.content": headline.sentence(),
        "fedemb.state": headline.state,
        "fedemb.headline": headline.title,
        "fedemb.run_id": found.name,
        "fedemb.policy_id": policy_id,
    }
    if report is not None:
        tags["fedemb.guarantee"] = guarantee_sentence(report.guarantee)
        tags["fedemb.model_sha"] = report.model_sha
    return tags


def _artifacts(run: RunDirectory) -> Iterator[tuple[str, bytes]]:
    """The signed documents, and their pages; without signature neither."""
    documents: dict[str, Any] = {
        "privacy_report": readable(lambda: signed_report(run)),
        "utility_report": readable(lambda: signed_utility(run)),
        "audit_report": readable(lambda: signed_audit(run)),
        "verdict": signed_verdict(run),
    }
    for name, signed in documents.items():
        if signed is not None:
            yield f"{name}.json", signed.data
            page = run.reports / f"{name}.html"
            if name in PAGES and page.is_file():
                yield page.name, page.read_bytes()
    plan = run.output("privacy_plan")
    if plan is not None and plan.is_file() and readable(lambda: signed_plan(run)) is not None:
        yield "privacy_plan.json", plan.read_bytes()


def _short(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"
