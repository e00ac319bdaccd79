"""The page of a run on one machine, and its line in the list of runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from fedemb.documents.artifacts import Artifact, RunArtifacts
from fedemb.documents.evidence import Evidence, read_evidence
from fedemb.documents.privacy_report import PrivacyReport
from fedemb.documents.verdict import AppliedWaiver, VerdictDocument
from fedemb.errors import AwaitingApproval, Interrupted, Refused
from fedemb.foundation.canonical_json import file_digest, json_digest, tree_digest
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
from fedemb.privacy.section import UNITS
from fedemb.release.decide import applied_waivers
from fedemb.reports.headline import Failure, Headline, RunFacts, headline
from fedemb.reports.measured_words import audit_answer
from fedemb.reports.mlflow import TrackedRun
from fedemb.reports.pages import audit_page, checklist_page, utility_page
from fedemb.reports.report import WAY_BACK, link, render

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


def _step(run: RunDirectory) -> str:
    """The step that runs now, as far as the state of the run says."""
    done = run.read_state().seconds
    return next((name for name in PIPELINE.steps if name not in done), "ending")


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
    )


PAGES = {
    "privacy_report": "privacy_page",
    "utility_report": "utility_page",
    "audit_report": "audit_page",
    "verdict": "verdict_page",
}
"""JSON output -> the output that is its page."""
NOTES = {
    "utility_report": "un-noised on those held out",
    "audit_report": "Public (figures are private)",
}
"""Description of an artifact instead of its kind."""

LEFT_OUT = {*PAGES.values(), "lineage"}
"""Published too, and shown otherwise."""

TITLES = {
    "privacy_report": "Privacy report",
    "utility_report": "Utility report",
    "audit_report": "Audit report",
    "verdict": "Gate checklist",
}


def render_index(run: RunDirectory) -> str:
    """Returns the page of a run that has ended, released or not."""
    state, found = run.read_state(), run_headline(run, running=False)
    lines = dict(line.split(": ", 1) for line in state.closing_lines)
    config = run.config()
    signed_utility(run)  # raises where it was changed
    signed, verdict = signed_report(run), signed_verdict(run)
    report = None if signed is None else signed.body
    return render(
        "run_index.html",
        run_id=run.run_id,
        purpose=config.purpose,
        headline=found,
        verdict=verdict and verdict.body,
        time=report.time if report else None,
        guarantee=lines.get("guarantee", "none"),
        utility=lines.get("utility", "not measured"),
        release=_below(run, lines.get("release", "none")),
        steps=[_index_step(name, run, state) for name in PIPELINE.after()],
        seconds=sum(state.seconds.values()),
        reports=[_report(name, run) for name in PAGES if (run.reports / f"{name}.html").exists()],
        artifacts=[
            _artifact(run, path, step, name, kind)
            for step, outputs in PIPELINE.published().items()
            for name, kind in outputs.items()
            if name not in LEFT_OUT and (path := run.output(name, step))
        ],
        facts=(
            (
                link("config.yaml", "config.yaml"),
                json_digest(config.model_dump(mode="json"))[:12],
            ),
            (
                "private artifacts",
                f"{config.storage.private_root or 'private/'} (readable by the data owner only)",
            ),
            ("log", link(run.log.name, run.log.name)),
        ),
    )


def _below(run: RunDirectory, release: str) -> str:
    """Returns the address of a release, or a sentence, with a link relative to the folder."""
    address, space, note = release.partition(" (")
    if not address.startswith(("gs://", "/")):
        return release  # a sentence, which may be too long for the name of a file
    inside = address.removeprefix(f"{run.root}/")
    if not (address.startswith("gs://") or (run.root / inside).exists()):
        return release
    return link(inside, inside) + space + note


def _index_step(
    name: str, run: RunDirectory, state: RunState
) -> tuple[str, str, float | None, str | None]:
    """Returns name, status, seconds and the page of a step."""
    took = state.seconds.get(name)
    status = "waiting" if took is None else "done"
    if state.failed_step == name:
        status = {
            Refused.exit_code: "refused",
            Interrupted.exit_code: "stopped",
            AwaitingApproval.exit_code: "waiting for approval",
        }.get(state.exit_code or 1, "failed")
    page = next((key for key, page in PAGES.items() if run.output(page, name)), None)
    shown = page is not None and (run.reports / f"{page}.html").exists()
    return name, status, took, f"reports/{page}.html" if shown else None


def _report(name: str, run: RunDirectory) -> tuple[str, str, str]:
    """Link and what is behind it; the page's head has said guarantee and utility already."""
    many = UNITS[run.config().policy.unit].many
    audit = signed_audit(run) if name == "audit_report" else None
    sentences = {
        "privacy_report": "Guarantee, cost and assumptions. Signed.",
        "utility_report": f"How well the model does on {many} that never trained.",
        "audit_report": audit_answer(audit.body, plan_mechanism(run.config())) if audit else "",
        "verdict": "Every rule of the gate: value, threshold, and whether it passed. Signed.",
    }
    return TITLES[name], f"reports/{name}.html", sentences[name]


def _artifact(
    run: RunDirectory, path: Path, step: str, name: str, kind: type[Artifact]
) -> dict[str, str]:
    digest = tree_digest(path) if path.is_dir() else file_digest(path)
    return {
        "name": name,
        "kind": NOTES.get(name, kind.__name__),
        "step": step,
        "path": path.relative_to(run.root).as_posix(),
        "digest": digest,
    }


_BACK = '<p class="back"><a href="../index.html">All of this run</a></p>'


def collect_reports(run: RunDirectory) -> dict[str, Path]:
    """Puts the newest reports and their pages into `reports/`; returns the pages by report.

    Anyone who may write to the public folder can replace a page there, so the page is made
    again here. Kubeflow shows its own.

    Raises:
      FedEmbError: as `signed_report`, or a document the page is made of is missing or broken.
    """
    made: dict[str, Path] = {}
    for name in PAGES:
        report = SIGNED[name](run)
        if report is None:
            continue
        write_bytes(run.reports / f"{name}.json", report.data)
        target, page = run.reports / f"{name}.html", _page(run, name, report)
        if page is None:
            target.unlink(missing_ok=True)
            continue
        made[name] = target
        write_bytes(target, page.replace(WAY_BACK, _BACK).encode())
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
        return checklist_page(report.body, run.run_id)
    if name == "audit_report":
        return audit_page(report.body, plan_mechanism(run.config()))
    if name == "utility_report":
        return utility_page(report.body)
    from fedemb.steps.account_privacy import page_of

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
    return page_of(report, evidence, ledger_of(run))
