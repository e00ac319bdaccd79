"""Allows a release, or raises with every reason and its remedy. There is no way around it.

The decision is the pure function `fedemb.gate.decide.decide`; this step reads the
documents strictly, lets it decide, signs the verdict and raises on a denial. What cannot be read is
a reason like any other.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from fedemb.config import FREE_SECTIONS, RunConfig
from fedemb.documents.artifacts import config_digest, write_bytes
from fedemb.documents.document import read
from fedemb.documents.evidence import Evidence, read_evidence, sentence_of
from fedemb.documents.privacy_report import PrivacyReport
from fedemb.documents.verdict import VerdictDocument
from fedemb.errors import GateDenied, StorageError
from fedemb.gate.case import Reason, Verdict
from fedemb.gate.decide import decide
from fedemb.keys.signatures import Signer, write_signed
from fedemb.keys.trust import TrustStore
from fedemb.lineage import send, write_run
from fedemb.step import leading_to
from fedemb.step_context import StepContext

_log = logging.getLogger(__name__)


def run(context: StepContext) -> dict[str, Any]:
    """Decides, writes the signed `verdict` and `verdict_page`, and raises if it denies.

    Writes `lineage` too, unless the evidence cannot be read. On a cluster kfp keeps them only if
    the gate does not deny; see `fedemb.outcome` for what is kept of a denied run.

    Returns:
      The verdict. A simulation gets `{"allow": false, "simulation": true}`: it is never released,
      and that is no failure.

    Raises:
      GateDenied: there are reasons against the release.
      StorageError: a store cannot be reached; run again.
    """
    config, artifacts = context.config, context.artifacts
    model_sha: str | None = None
    report_sha: str | None = None
    run_id: str | None = None
    ledger_head: str | None = None
    evidence: Evidence | None = None
    trust: TrustStore | None = None
    try:
        report = read(artifacts.privacy_report, PrivacyReport)
        evidence = read_evidence(config, artifacts)
        model_sha, report_sha = evidence.model.body.weights_sha, report.sha
        run_id = report.body.run_id
        if config.purpose == "simulation":
            verdict = Verdict(False, (), simulation=True)
        else:
            trust = context.trust  # of the signature, should the ledger be broken
            trust = context.ledger.chain.trust
            verdict = decide(evidence, report, context.ledger)
            ledger_head = report.body.cumulative.ledger_head
    except StorageError:
        raise
    except Exception as error:  # fails closed: what cannot be read denies
        reason = Reason(
            "evidence_unreadable", sentence_of(error), "run the step that writes it again"
        )
        verdict = Verdict(False, (reason,), simulation=config.purpose == "simulation")
    document = _document(config, verdict, model_sha, report_sha, run_id)
    keys = context.keys
    # A denial needs no trust, so it is signed even where the ledger cannot be read.
    signer = Signer.current(keys, "gate", trust) if trust else Signer.load_or_create(keys, "gate")
    signed = write_signed(artifacts.verdict, document, signer)
    write_bytes(artifacts.verdict_page, page(verdict, document).encode())
    denied = not verdict.allow and not verdict.simulation
    if evidence is not None and report_sha is not None:
        write_run(
            artifacts.lineage,
            evidence,
            leading_to("gate_release", config.task),
            digests={
                "privacy_report": report_sha,
                "verdict": signed.sha,
                "ledger_head": ledger_head,
            },
            # The rules hold them against the ledger; nobody looked at those of a simulation.
            commitments=evidence.users.body.commitments.model_dump() if verdict.allow else {},
            denied=denied,
        )
        send(artifacts.lineage.read_bytes)
    if denied:
        raise GateDenied(explain(verdict.reasons))
    _log.info("gate: %s", "allowed" if verdict.allow else "a simulation is never released")
    return signed.json


def _document(
    config: RunConfig,
    verdict: Verdict,
    model_sha: str | None,
    report_sha: str | None,
    run_id: str | None,
) -> VerdictDocument:
    name, version = (None, None) if run_id is None else config.released_as(run_id)
    fields: dict[str, Any] = {
        "allow": verdict.allow,
        "simulation": verdict.simulation,
        "reasons": [reason.code for reason in verdict.reasons],
        "waived": list(verdict.waived),
        "audit_level": config.policy.audit_level,
        "config_sha": config_digest(config, *FREE_SECTIONS),
        "model_sha": model_sha,
        "report_sha": report_sha,
        "name": name,
        "version": version,
    }
    return VerdictDocument.of_fields(fields)


def page(verdict: Verdict, document: VerdictDocument) -> str:
    """The verdict in Markdown: what was decided, each reason with its remedy, and of what."""
    headline = "A simulation, which is never released" if verdict.simulation else "Denied"
    lines = [f"# {'Allowed' if verdict.allow else headline}", ""]
    for reason in verdict.reasons:
        lines += [f"- `{reason.code}`: {_plain(reason.sentence)}; {_plain(reason.remedy)}"]
    waived = ", ".join(f"`{code}`" for code in verdict.waived)
    lines += ["", "| of | |", "|---|---|", f"| model | `{document.model_sha}` |"]
    lines += [f"| privacy report | `{document.report_sha}` |"]
    lines += [f"| release | {_plain(f'{document.name} {document.version}')} |"]
    lines += [f"| audit asked for | {document.audit_level} |"]
    lines += [f"| waived | {waived or 'nothing'} |", ""]
    return "\n".join([*lines, "The signed `verdict` counts; this page is for reading.", ""])


def _plain(text: str) -> str:
    """A sentence as Markdown shows it: on one line, with no markup of its own."""
    return " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;").replace("[", "\\[")


def explain(reasons: Sequence[Reason]) -> str:
    """All reasons in one paragraph, the most important first."""
    first, *rest = reasons
    text = f"{first.sentence}; {first.remedy}"
    if rest:
        text += f" (and {len(rest)} more: " + "; ".join(item.sentence for item in rest) + ")"
    return text


__all__ = ["decide", "explain", "page", "run"]
