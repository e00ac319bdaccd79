"""The headline of a run on this machine: from its signed documents and its own state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import partial
from typing import Any

from fedemb.documents.privacy_report import PrivacyReport
from fedemb.documents.verdict import AppliedWaiver, VerdictDocument
from fedemb.foundation.document import Written
from fedemb.gate.decide import applied_waivers
from fedemb.pipelines.run.directory import RunDirectory
from fedemb.pipelines.run.signed import (
    ledger_of,
    readable,
    signed_audit,
    signed_plan_document,
    signed_report,
    signed_utility,
    signed_verdict,
)
from fedemb.reports.headline import Failure, Headline, RunFacts, headline
from fedemb.reports.mlflow import TrackedRun

SIGNED: Mapping[str, Callable[[RunDirectory], Written[Any] | None]] = {
    "privacy_report": signed_report,
    "utility_report": signed_utility,
    "audit_report": signed_audit,
    "verdict": signed_verdict,
    "privacy_plan": signed_plan_document,
}
"""JSON output -> how it is read once its signature holds."""


def run_headline(run: RunDirectory, *, running: bool | None = None) -> Headline:
    """Returns how a run stands. Documents whose signature cannot be checked are left out.

    `running` None: looks whether a process holds its lock.
    """
    state = run.read_state()
    code, failed = state.exit_code, state.failed_step
    ended = code is not None and (code == 0 or failed is not None or bool(state.message))
    # A verdict or release of an earlier start says nothing while the run is on its way again.
    judged = "gate_release" in state.seconds or failed in ("gate_release", "release_model")
    ended_well = code == 0 and run.config().purpose == "release"
    released = ended_well and bool(readable(lambda: _in_ledger(run)))
    verdict = signed_verdict(run) if judged else None
    report, utility = readable(lambda: signed_report(run)), readable(lambda: signed_utility(run))
    facts = RunFacts(
        verdict=None if verdict is None else verdict.body,
        report=None if report is None else report.body,
        utility=None if utility is None else utility.body,
        released=released,
        simulation=run.config().purpose == "simulation",
        failures=([Failure(failed, code or 1, state.error or "")] if failed else ()),
        running=_step(run) if (run.is_running() if running is None else running) else None,
        completed=code == 0 if ended else False,
        overdue=bool(report and readable(lambda: overdue(run, report))),
    )
    waivers = readable(lambda: _waivers(run, verdict, report)) if released and report else None
    return headline(facts, waivers=waivers)


def _waivers(
    run: RunDirectory, verdict: Written[VerdictDocument] | None, report: Written[PrivacyReport]
) -> list[AppliedWaiver] | None:
    """The waivers that the report states if the release has no verdict, otherwise None."""
    if verdict is not None:
        return None
    stated = [item.code for item in report.body.waivers]
    return applied_waivers(ledger_of(run), list(dict.fromkeys(stated)), report.body)


def overdue(run: RunDirectory, report: Written[PrivacyReport]) -> bool:
    """Whether the deadline of the approvals has passed without enough of them in the ledger."""
    deadline = report.body.approve_by
    return deadline is not None and datetime.now(UTC) > deadline and missing(run, report) > 0


def missing(run: RunDirectory, report: Written[PrivacyReport]) -> int:
    """Returns how many approvals the run still needs; at most 0: none.

    Raises:
      LedgerError: the ledger is missing or broken.
    """
    ledger, body = ledger_of(run), report.body
    given = ledger.state.approvals_of(body.model_sha, report.sha, body.approve_by)
    return ledger.terms.approvals - len(given)


def _in_ledger(run: RunDirectory) -> bool:
    """Whether the ledger has a release of the run; its state file alone does not count."""
    attempts = ledger_of(run).state.attempts
    return any(
        attempt.releases for (run_id, _), attempt in attempts.items() if run_id == run.run_id
    )


def _step(run: RunDirectory) -> str:
    """The step that runs now, as far as the state of the run says."""
    from fedemb.pipelines.steps import pipeline_of

    done = run.read_state().seconds
    return next((name for name in pipeline_of(run.config()).steps if name not in done), "ending")


def tracked_run(run: RunDirectory) -> TrackedRun:
    """Returns the public content of a run, as MLflow shows it.

    Raises:
      ArtifactError: the configuration or the state of the run is damaged.
    """
    documents = {name: readable(partial(read, run)) for name, read in SIGNED.items()}
    pages = (run.reports / f"{name}.html" for name, item in documents.items() if item)
    return TrackedRun(
        name=run.run_id,
        headline=run_headline(run),
        config=run.config(),
        documents=documents,
        pages={path.name: path.read_bytes() for path in pages if path.is_file()},
        seconds=run.read_state().seconds,
        signatures="checked",
    )
