"""The page of a run on one machine, and its line in the list of runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from fedemb.documents.artifacts import RunArtifacts
from fedemb.documents.evidence import Evidence, read_evidence
from fedemb.documents.fields import points
from fedemb.documents.privacy_report import PrivacyReport
from fedemb.documents.verdict import AppliedWaiver, VerdictDocument
from fedemb.errors import AwaitingApproval, FedEmbError, Interrupted, Refused
from fedemb.foundation.document import Written
from fedemb.foundation.files import write_bytes
from fedemb.pipelines.run.directory import (
    RunDirectory,
    RunState,
    ledger_of,
    readable,
    signed_audit,
    signed_plan_document,
    signed_report,
    signed_utility,
    signed_verdict,
)
from fedemb.pipelines.steps import PIPELINE
from fedemb.privacy.registry import plan_mechanism
from fedemb.release.decide import applied_waivers
from fedemb.reports import pages as drawn
from fedemb.reports.headline import Documents, Failure, Headline, RunFacts, headline
from fedemb.reports.mlflow import TrackedRun
from fedemb.reports.report import BACK_LINK, link, render
from fedemb.runtime.step import leading_to
from fedemb.storage import join

NOT_SIGNED = "not signed or not readable, or its ledger is gone"
"""Instead of the headline of a run."""
SIGNED: Mapping[str, Callable[[RunDirectory], Written[Any] | None]] = {
    "privacy_report": signed_report,
    "utility_report": signed_utility,
    "audit_report": signed_audit,
    "verdict": signed_verdict,
    "privacy_plan": signed_plan_document,
}
"""JSON output -> how it is read once its signature holds."""


def documents_of(run: RunDirectory, names: Iterable[str] = SIGNED) -> Documents:
    """Returns the documents of a run whose signature holds; None: missing or not valid."""
    return {name: readable(partial(SIGNED[name], run)) for name in names}


def run_headline(run: RunDirectory, *, ended: bool = False) -> Headline:
    """Returns how a run stands, or has just ended in this process.

    Documents whose signature cannot be checked are left out.
    """
    documents = documents_of(run, ("privacy_report", "utility_report", "verdict"))
    return _standing(run, documents, running=not ended and run.is_running())[1]


class RunRow(NamedTuple):
    """How a run stands, as JSON and as the cells of `RUN_COLUMNS`."""

    facts: Mapping[str, str | float]
    cells: list[str]


def run_row(run: RunDirectory) -> RunRow:
    """Returns the row of a run in the list. A run that cannot be read hides no other run."""
    try:
        documents = documents_of(run, ("privacy_report", "utility_report", "verdict"))
        facts, found = _standing(run, documents, running=run.is_running())
    except FedEmbError:
        known = {"run_id": run.run_id, "headline": NOT_SIGNED}
        return RunRow(known, [*known.values(), *"???----"])
    made: dict[str, str | float] = {
        "run_id": run.run_id,
        "headline": found.title,
        **facts.figures(),
    }
    rows, gain = found.figures.rows(), points(found.figures.gain) if found.figures.gain else "-"
    cells, origin = [run.run_id, found.title, rows[0].value, rows[-2].value, gain], [*"----"]
    if report := facts.report:
        attempt = ledger_of(run).state.attempts[report.run_id, report.attempt]
        signed = report.provenance
        origin = [report.time, attempt.reserve.actor, signed.code_sha, signed.inputs_sha]
        made |= zip(("time", "author", "code_sha", "inputs_sha"), origin, strict=True)
    return RunRow(made, [*cells, origin[0][:16], origin[1], *(sha[:8] for sha in origin[2:])])


def _standing(
    run: RunDirectory, documents: Documents, *, running: bool
) -> tuple[RunFacts, Headline]:
    state = run.read_state()
    code, failed = state.exit_code, state.failed_step
    ended = code is not None and (code == 0 or failed is not None or bool(state.message))
    # A verdict or release of an earlier start says nothing while the run is on its way again.
    judged = "gate_release" in state.seconds or failed in ("gate_release", "release_model")
    verdict, report = documents["verdict"] if judged else None, documents["privacy_report"]
    ended_well = code == 0 and run.config().purpose == "release"
    released = ended_well and bool(readable(lambda: _in_ledger(run)))
    failure = failed and Failure(failed, code or 1, state.error or "", state.message or "")
    step = next((name for name in PIPELINE.steps if name not in state.seconds), "ending")
    facts = replace(
        RunFacts.of({**documents, "verdict": verdict}),
        released=released,
        simulation=run.config().purpose == "simulation",
        failures=[failure] if failure else [],
        running=step if running else None,
        completed=code == 0 if ended else False,
        overdue=bool(report and readable(lambda: overdue(run, report))),
    )
    waivers = readable(lambda: _waivers(run, verdict, report)) if released and report else None
    return facts, headline(facts, waivers=waivers)


def _waivers(
    run: RunDirectory, verdict: Written[VerdictDocument] | None, report: Written[PrivacyReport]
) -> list[AppliedWaiver] | None:
    """The waivers that the report states if the release has no verdict, otherwise None."""
    if verdict is not None:
        return None
    stated = [item.code for item in report.body.waivers]
    return applied_waivers(ledger_of(run), list(dict.fromkeys(stated)), report.body)


def overdue(run: RunDirectory, report: Written[PrivacyReport]) -> bool:
    """Whether the deadline of the approvals has passed without enough of them in the ledger.

    Raises:
      LedgerError: the deadline has passed, and the ledger is missing or broken.
    """
    body = report.body
    if body.approve_by is None or datetime.now(UTC) <= body.approve_by:
        return False
    ledger = ledger_of(run)
    given = ledger.state.approvals_of(body.model_sha, report.sha, body.approve_by)
    return len(given) < ledger.terms.approvals


def _in_ledger(run: RunDirectory) -> bool:
    """Whether the ledger has a release of the run; its state file alone does not count."""
    attempts = ledger_of(run).state.attempts
    return any(
        attempt.releases for (run_id, _), attempt in attempts.items() if run_id == run.run_id
    )


def tracked_run(run: RunDirectory) -> TrackedRun:
    """Returns the public content of a run, as MLflow shows it.

    Raises:
      ArtifactError: the configuration or the state of the run is damaged.
    """
    documents = documents_of(run)
    pages = (run.reports / f"{name}.html" for name, item in documents.items() if item)
    return TrackedRun(
        name=run.run_id,
        headline=run_headline(run),
        config=run.config(),
        documents=documents,
        pages={path.name: path.read_bytes() for path in pages if path.is_file()},
        seconds=run.read_state().seconds,
    )


def render_index(run: RunDirectory) -> str:
    """Returns the page of a run that has ended, released or not.

    Raises:
      FedEmbError: as `signed_report`, for the privacy report and the utility report.
    """
    for name in ("privacy_report", "utility_report"):
        SIGNED[name](run)
    state, private = run.read_state(), run.config().storage.private_root
    facts, found = _standing(run, documents_of(run), running=False)
    stopped = f"none: {state.message}" if state.message and not facts.failures else None
    shown = drawn.run_page(
        facts,
        found,
        run=run.run_id,
        release=_release(run) if facts.released else stopped,
        pages={
            page: f"reports/{name}.html"
            for name, (page, _) in drawn.REPORTS.items()
            if (run.reports / f"{name}.html").exists()
        },
    )
    return render(
        "run_page.html",
        **shown,
        folder=None,
        steps=[(name, _status(name, state), state.seconds.get(name)) for name in PIPELINE.after()],
        facts=[
            ("configuration", link("config.yaml", "config.yaml")),
            ("public artifacts", link("public", "public")),
            ("private artifacts", f"{private or 'private/'} (readable by the data owner only)"),
            ("log", link(run.log.name, run.log.name)),
        ],
    )


def _release(run: RunDirectory) -> str:
    """Returns the address of the release, as a link if a browser can open it."""
    address = join(run.stores()["releases"], "/".join(run.config().released_as(run.run_id)))
    inside = address.removeprefix(f"{run.root}/")
    reached = address.startswith("gs://") or (run.root / inside).exists()
    return link(inside, inside) if reached else address


def _status(name: str, state: RunState) -> str:
    if state.failed_step == name:
        return {
            Refused.exit_code: "refused",
            Interrupted.exit_code: "stopped",
            AwaitingApproval.exit_code: "waiting for approval",
        }.get(state.exit_code or 1, "failed")
    return "done" if name in state.seconds else "waiting"


_BACK = '<p class="back"><a href="../index.html">All of this run</a></p>'


def collect_reports(run: RunDirectory) -> dict[str, Path]:
    """Puts the newest reports and their pages into `reports/`; returns the pages by report.

    Anyone who may write to the public folder can replace a page there, so the page is made
    again here. Kubeflow shows its own.

    Raises:
      FedEmbError: as `signed_report`, or a document the page is made of is missing or broken.
    """
    made: dict[str, Path] = {}
    for name in drawn.REPORTS:
        report = SIGNED[name](run)
        if report is None:
            continue
        write_bytes(run.reports / f"{name}.json", report.data)
        target, page = run.reports / f"{name}.html", _page(run, name, report)
        if page is None:
            target.unlink(missing_ok=True)
            continue
        made[name] = target
        write_bytes(target, page.replace(BACK_LINK, _BACK).encode())
    return made


def evidence_of(run: RunDirectory) -> Evidence:
    """The newest documents of a run, unchecked; the gate's rules compare them with each other.

    Raises:
      ArtifactError: one is missing or broken.
    """
    names = ("privacy_plan", "reservation", "users", "model", "pretrained")
    paths = {item: run.output(item) for item in (*names, "audit_report", "utility_report")}
    artifacts = RunArtifacts(**{item: path for item, path in paths.items() if path is not None})
    return read_evidence(run.config(), artifacts)


def _page(run: RunDirectory, name: str, report: Written[Any]) -> str | None:
    """None: the newest documents are not those that the privacy report names, so it has no page.

    A run that evaluates again has newer ones until it accounts again.
    """
    if name == "verdict":
        return drawn.checklist_page(report.body, run.run_id)
    if name == "audit_report":
        return drawn.audit_page(report.body, plan_mechanism(run.config()))
    if name == "utility_report":
        return drawn.utility_page(report.body)
    evidence = evidence_of(run)
    found = {
        "plan_document": evidence.plan.sha,
        "reservation_document": evidence.reservation.sha,
        "users_document": evidence.users.sha,
        "audit_document": evidence.audit.sha,
        "utility_document": evidence.utility.sha,
        "model_files": evidence.model_files,
    }
    named = report.body.provenance.model_dump()
    if {item: named[item] for item in found} != found:
        return None
    return drawn.report_page(report, evidence, ledger_of(run), leading_to("account_privacy"))
