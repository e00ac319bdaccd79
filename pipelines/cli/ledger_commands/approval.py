"""Text that an approver reads before signing: figures, users, and the decision of the gate."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from fedemb.errors import InputError, Refused

if TYPE_CHECKING:
    from fedemb.documents.privacy_report import PrivacyReport
    from fedemb.documents.utility import AnyUtility
    from fedemb.documents.verdict import AppliedWaiver, VerdictDocument
    from fedemb.foundation.document import Written
    from fedemb.ledger import Ledger
    from fedemb.pipelines.run.directory import RunDirectory


@dataclass(frozen=True)
class Candidate:
    """A run that a person may approve."""

    report: Written[PrivacyReport]
    utility: Written[AnyUtility] | None
    ledger: str | None
    """Root of the ledgers; None: the run does not say."""
    rollback_anchor: str | None
    judge: Callable[[Ledger], Judged | None]
    """Returns what the gate says of the run; None: not known here."""


@dataclass(frozen=True)
class Judged:
    """The verdict of the gate on a run, apart from its approvals."""

    reasons: tuple[str, ...]
    """Each reason that approvals do not remove."""
    waivers: tuple[AppliedWaiver, ...]


def judge_run(run: RunDirectory, report: Written[PrivacyReport], ledger: Ledger) -> Judged:
    """Asks the rules of the gate about a run on this machine.

    Raises:
      ArtifactError: a document of the run is missing or broken.
    """
    from fedemb.documents.verdict import NOT_APPROVED
    from fedemb.gate.decide import applied_waivers, decide
    from fedemb.pipelines.run.report_pages import evidence_of

    verdict = decide(evidence_of(run), report, ledger)
    kept = [reason for reason in verdict.reasons if reason.code != NOT_APPROVED]
    return Judged(
        tuple(f"{reason.sentence} ({reason.code})" for reason in kept),
        tuple(applied_waivers(ledger, verdict.waived, report.body)),
    )


def judge_verdict(
    verdict: Written[VerdictDocument], report: Written[PrivacyReport], ledger: Ledger
) -> Judged:
    """Returns what the gate decided about a report, from its signed verdict.

    Raises:
      InputError: the verdict is about another report.
      SignatureInvalid: the gate did not sign it.
    """
    from fedemb.documents.verdict import NOT_APPROVED

    ledger.chain.trust.check(verdict, at=report.body.cumulative.ledger_sequence)
    if verdict.body.report_sha != report.sha:
        raise InputError(
            f"The verdict is about another report than {report.sha[:12]}. Pass the verdict of this "
            "run."
        )
    codes = tuple(code for code in verdict.body.reasons if code != NOT_APPROVED)
    return Judged(codes, tuple(verdict.body.waivers))


def require_allowed(judged: Judged | None, run_id: str) -> None:
    """Refuses to ask for a signature that changes nothing.

    Raises:
      Refused: the gate denies the run for another reason.
    """
    if judged is not None and judged.reasons:
        raise Refused(
            f"run {run_id} stays refused, with or without approvals: {'; '.join(judged.reasons)}; "
            "nothing was written"
        )


def require_in_time(report: PrivacyReport) -> None:
    """Refuses to ask for a signature that no longer counts.

    Raises:
      Refused: the deadline of the approvals has passed.
    """
    deadline = report.approve_by
    if deadline is not None and datetime.now(UTC) > deadline:
        raise Refused(
            f"The approvals of run {report.run_id} were due by {deadline:%Y-%m-%d %H:%M} UTC, so "
            "this one does not count. Nothing was written. Resume the run from account_privacy for "
            "another deadline; nothing is trained again."
        )


def terms_shown(
    report: Written[PrivacyReport], utility: Written[AnyUtility] | None, judged: Judged | None
) -> Iterator[str]:
    """The figures in the order of the headline, and the waivers the release would rest on."""
    from fedemb.reports.formats import signer_name
    from fedemb.reports.headline import Figures

    for row in Figures.of(report.body, utility and utility.body).rows():
        yield f"{row.label}: {row.value}" + (f", {row.note}" if row.note else "")
    for item in () if judged is None else judged.waivers:
        yield f"waived by {signer_name(item.actor)}: {item.code}, {item.reason}"


def after_signature(judged: Judged | None, given: int, needed: int) -> str:
    """Returns the verdict of the gate after this signature, which `given` counts too."""
    if given < needed:
        return f"after your signature: still waiting, {given} of {needed} approvals"
    if judged is None:
        return (
            f"after your signature: {given} of {needed} approvals; the other rules of the gate "
            "were not evaluated, pass the run directory or --verdict"
        )
    waived = " with a waiver" if judged.waivers else ""
    return f"after your signature: the gate allows the release{waived}"
