"""Allows a release, or raises with every reason and its remedy. The decision cannot be bypassed.

The decision is the pure function `fedemb.gate.decide.decide`. This step reads the documents
strictly, calls the function, signs the verdict and raises on a denial. An unreadable document is a
reason for denial.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from fedemb.config import FREE_SECTIONS, RunConfig
from fedemb.config.digest import config_digest
from fedemb.documents.evidence import Evidence, read_evidence, sentence_of
from fedemb.documents.privacy_report import PrivacyReport
from fedemb.documents.verdict import NOT_APPROVED, VerdictDocument
from fedemb.errors import AwaitingApproval, GateDenied, LedgerError, SignatureInvalid, StorageError
from fedemb.foundation.canonical_json import JsonObject
from fedemb.foundation.document import read
from fedemb.foundation.files import write_bytes
from fedemb.gate.case import Reason, Verdict
from fedemb.gate.decide import applied_waivers, decide, given_approvals
from fedemb.keys import KeyStore
from fedemb.keys.signatures import Signer, write_signed
from fedemb.keys.trust import TrustStore
from fedemb.ledger import Ledger
from fedemb.reports.lineage import send, write_run
from fedemb.reports.report import signer_name
from fedemb.runtime.step import leading_to
from fedemb.runtime.step_context import StepContext

_log = logging.getLogger(__name__)


def run(context: StepContext) -> JsonObject:
    """Decides, writes the signed `verdict` and `verdict_page`, and raises on a denial.

    Also writes `lineage`, unless the evidence cannot be read. On a cluster, kfp keeps these outputs
    only if the gate allows; see `fedemb.runtime.outcome` for the outputs of a denied run.

    Returns:
      The verdict. A simulation gets `{"allow": false, "simulation": true}`: it is never released,
      and the step does not fail.

    Raises:
      AwaitingApproval: only approvals are missing.
      GateDenied: there are other reasons against the release.
      StorageError: a store cannot be reached; run again.
    """
    config, artifacts = context.config, context.artifacts
    judged: Judged | None = None
    evidence: Evidence | None = None
    trust: TrustStore | None = None
    ledger: Ledger | None = None
    try:
        report = read(artifacts.privacy_report, PrivacyReport)
        evidence = read_evidence(config, artifacts)
        judged = Judged(evidence.model.body.weights_sha, report.sha, report.body)
        if config.purpose == "simulation":
            verdict = Verdict(False, (), simulation=True)
        else:
            trust = context.trust  # for the signature, in case the ledger is broken
            trust = context.ledger.chain.trust
            verdict = decide(evidence, report, context.ledger)
            ledger = context.ledger
    except StorageError:
        raise
    except Exception as error:  # unreadable evidence is a denial
        verdict = _unreadable(error, simulation=config.purpose == "simulation")
    document = _document(config, verdict, judged, ledger)
    signed = write_signed(artifacts.verdict, document, _signer(context.keys, trust))
    write_bytes(artifacts.verdict_page, page(verdict, document).encode())
    denied = not verdict.allow and not verdict.simulation
    if evidence is not None and judged is not None:
        head = None if ledger is None else judged.report.cumulative.ledger_head
        digests = {"privacy_report": judged.report_sha, "verdict": signed.sha, "ledger_head": head}
        # The rules compare these with the ledger; those of a simulation are not verified.
        verified = evidence.users.body.commitments.model_dump() if verdict.allow else {}
        steps = leading_to("gate_release", config.task)
        write_run(
            artifacts.lineage,
            evidence,
            steps,
            digests=digests,
            commitments=verified,
            denied=denied,
        )
        send(artifacts.lineage.read_bytes)
    if denied:
        kind = AwaitingApproval if verdict.waiting else GateDenied
        raise kind(explain(verdict.reasons))
    _log.info("gate: %s", "allowed" if verdict.allow else "a simulation is never released")
    return signed.json


def _signer(keys: KeyStore, trust: TrustStore | None) -> Signer:
    # A denial needs no trust, so it is signed even if the ledger cannot be read.
    return Signer.current(keys, "gate", trust) if trust else Signer.load_or_create(keys, "gate")


def _unreadable(error: Exception, *, simulation: bool) -> Verdict:
    """Returns the denial of a run whose evidence cannot be read."""
    remedy = "run the step that writes it again"
    reason = Reason("evidence_unreadable", sentence_of(error), remedy)
    return Verdict(False, (reason,), simulation=simulation)


@dataclass(frozen=True)
class Judged:
    """The subject of the verdict."""

    model_sha: str
    report_sha: str
    report: PrivacyReport


def _document(
    config: RunConfig, verdict: Verdict, judged: Judged | None, ledger: Ledger | None
) -> VerdictDocument:
    name, version = (None, None) if judged is None else config.released_as(judged.report.run_id)
    fields: dict[str, Any] = {
        "allow": verdict.allow,
        "simulation": verdict.simulation,
        "reasons": [reason.code for reason in verdict.reasons],
        "waived": list(verdict.waived),
        "audit_level": config.policy.audit_level,
        "config_sha": config_digest(config, *FREE_SECTIONS),
        "model_sha": judged and judged.model_sha,
        "report_sha": judged and judged.report_sha,
        "name": name,
        "version": version,
        "checks": [{**vars(check), "reasons": list(check.reasons)} for check in verdict.checks],
        "waivers": [],
        "approvals": [],
        "approvals_needed": None,
        "ledger_sequence": None,
    }
    if judged is not None and ledger is not None:
        with suppress(LedgerError, SignatureInvalid):  # a record breaks a rule, which denies
            fields |= {
                "waivers": applied_waivers(ledger, verdict.waived, judged.report),
                "approvals": given_approvals(
                    ledger, judged.model_sha, judged.report_sha, judged.report.approve_by
                ),
                "approvals_needed": ledger.terms.approvals,
                "ledger_sequence": ledger.head.sequence,
            }
    return VerdictDocument.of_fields(fields)


def page(verdict: Verdict, document: VerdictDocument) -> str:
    """Returns the verdict in Markdown: decision, reasons with remedies, and checklist."""
    state = (
        "Simulation: never released"
        if verdict.simulation
        else "Waiting for approval"
        if verdict.waiting
        else "Allowed"
        if verdict.allow
        else "Denied"
    )
    lines = [f"# {state}", ""]
    for reason in verdict.reasons:
        lines += [f"- `{reason.code}`: {_plain(reason.sentence)}; {_plain(reason.remedy)}"]
    for waiver in document.waivers:
        who = _plain(signer_name(waiver.actor))
        lines += [f"- `{waiver.code}` waived by {who}: {_plain(waiver.reason)}"]
    for approval in document.approvals:
        lines += [f"- approved by {_plain(approval.actor)}, ledger record {approval.sequence}"]
    if document.checks:
        lines += ["", "| rule | outcome | value | threshold |", "|---|---|---|---|"]
        for check in document.checks:
            cells = (_cell(check.value) or "-", _cell(check.threshold) or "-")
            outcome = "waiting" if check.reasons == [NOT_APPROVED] else check.outcome
            lines += [f"| `{check.rule}` | {outcome} | {cells[0]} | {cells[1]} |"]
    lines += ["", "| of | |", "|---|---|", f"| model | `{document.model_sha}` |"]
    lines += [f"| privacy report | `{document.report_sha}` |"]
    lines += [f"| release | {_plain(f'{document.name} {document.version}')} |"]
    lines += [f"| audit level | {document.audit_level} |", ""]
    return "\n".join([*lines, "The signed `verdict` counts; this page is for reading.", ""])


def _cell(text: str) -> str:
    return _plain(text).replace("|", "\\|")


def _plain(text: str) -> str:
    """Returns a sentence escaped for Markdown: on one line, without markup."""
    return " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;").replace("[", "\\[")


def explain(reasons: Sequence[Reason]) -> str:
    """Returns all reasons in one paragraph, the most important first."""
    first, *rest = reasons
    text = f"{first.sentence}; {first.remedy}"
    if rest:
        text += f" (and {len(rest)} more: " + "; ".join(item.sentence for item in rest) + ")"
    return text


__all__ = ["decide", "explain", "page", "run"]
