"""The pages of a run: each made of its report once the signature held, never taken from a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedemb.documents.classifier import ClassifierReport
from fedemb.documents.evidence import Evidence, read_evidence
from fedemb.documents.run_artifacts import RunArtifacts
from fedemb.foundation.document import Written
from fedemb.foundation.files import write_bytes
from fedemb.pipelines.run.directory import RunDirectory
from fedemb.pipelines.run.signed import (
    ledger_of,
    signed_audit,
    signed_report,
    signed_utility,
    signed_verdict,
)
from fedemb.privacy.mechanisms.registry import plan_mechanism
from fedemb.reports.report import WAY_BACK

PAGES = {
    "privacy_report": "privacy_page",
    "utility_report": "utility_page",
    "audit_report": "audit_page",
    "verdict": "verdict_page",
}
"""JSON output -> the output that is its page."""
_SIGNED = {
    "privacy_report": signed_report,
    "utility_report": signed_utility,
    "audit_report": signed_audit,
    "verdict": signed_verdict,
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
    for name, read_signed in _SIGNED.items():
        report: Written[Any] | None = read_signed(run)
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
        from fedemb.reports.checklist_page import checklist_page

        return checklist_page(report.body, run.run_id)
    if name == "audit_report":
        from fedemb.steps.audit_privacy.page import audit_page

        return audit_page(report.body, plan_mechanism(run.config()))
    if name == "utility_report":
        if isinstance(report.body, ClassifierReport):
            from fedemb.steps.evaluate_classifier.page import classifier_page

            return classifier_page(report.body)
        from fedemb.steps.evaluate_embeddings.page import utility_page

        return utility_page(report.body)
    from fedemb.steps.account_privacy.account import page_of

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
