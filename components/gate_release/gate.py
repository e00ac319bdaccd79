"""Allows a release, or raises with every reason and its remedy. There is no way around it.

The decision is the pure function `fedemb.gate.decide.decide`; this step reads the
documents strictly, lets it decide, signs the verdict and raises on a denial. What cannot be read is
a reason like any other.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from fedemb.config import RunConfig
from fedemb.documents.artifacts import config_digest, file_digest, write_json
from fedemb.documents.evidence import Evidence, read_document, read_evidence, sentence_of
from fedemb.errors import GateDenied, StorageError
from fedemb.gate.case import Reason, Verdict
from fedemb.gate.decide import decide
from fedemb.keys.signatures import Signer, sign_document
from fedemb.keys.trust import TrustStore
from fedemb.lineage import send, write_run
from fedemb.step_context import StepContext

SCHEMA = "fedemb/verdict/1"

_log = logging.getLogger(__name__)


def run(context: StepContext) -> dict[str, Any]:
    """Decides, writes the signed `verdict`, and raises if it denies.

    Writes `lineage` too, unless the evidence cannot be read. On a cluster kfp keeps it, like the
    verdict, only if the gate does not deny.

    Returns:
      The verdict. A simulation gets `{"allow": false, "simulation": true}`: it is never released,
      and that is no failure.

    Raises:
      GateDenied: there are reasons against the release.
      StorageError: a store cannot be reached; run again.
    """
    config, artifacts = context.config, context.artifacts
    model_sha = report_sha = ""
    evidence: Evidence | None = None
    trust: TrustStore | None = None
    try:
        report = read_document(artifacts.privacy_report, "report")
        evidence = read_evidence(config, artifacts)
        model_sha, report_sha = str(evidence.model.body.get("weights_sha")), report.sha
        if config.purpose == "simulation":
            verdict = Verdict(False, (), simulation=True)
        else:
            trust = context.trust  # of the signature, should the ledger be broken
            trust = context.ledger.chain.trust
            verdict = decide(evidence, report.body, context.ledger)
    except StorageError:
        raise
    except Exception as error:  # fails closed: what cannot be read denies
        reason = Reason(
            "evidence_unreadable", sentence_of(error), "run the step that writes it again"
        )
        verdict = Verdict(False, (reason,), simulation=config.purpose == "simulation")
    document = _document(config, verdict, model_sha, report_sha)
    # Nobody has to believe a denial, so it is signed even where the ledger cannot be read.
    signer = (
        Signer.current(context.keys, "gate", trust)
        if trust
        else Signer.load_or_create(context.keys, "gate")
    )
    signed = sign_document(document, signer)
    write_json(artifacts.verdict, SCHEMA, {key: signed[key] for key in signed if key != "schema"})
    denied = not verdict.allow and not verdict.simulation
    if evidence is not None:
        verdict_sha = file_digest(artifacts.verdict)
        write_run(
            artifacts.lineage,
            evidence,
            report_sha=report_sha,
            # The rules hold them against the ledger; nobody looked at those of a simulation.
            commitments=evidence.users.body["commitments"] if verdict.allow else {},
            verdict_sha=verdict_sha,
            denied=denied,
        )
        send(artifacts.lineage.read_bytes)
    if denied:
        raise GateDenied(explain(verdict.reasons))
    _log.info("gate: %s", "allowed" if verdict.allow else "a simulation is never released")
    return signed


def _document(
    config: RunConfig, verdict: Verdict, model_sha: str, report_sha: str
) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "allow": verdict.allow,
        "simulation": verdict.simulation,
        "reasons": [vars(reason) for reason in verdict.reasons],
        "waived": list(verdict.waived),
        "audit_level": config.policy.audit_level,
        "config_sha": config_digest(config),
        "model_sha": model_sha,
        "report_sha": report_sha,
    }


def explain(reasons: Sequence[Reason]) -> str:
    """All reasons in one paragraph, the most important first."""
    first, *rest = reasons
    text = f"{first.sentence}; {first.remedy}"
    if rest:
        text += f" (and {len(rest)} more: " + "; ".join(item.sentence for item in rest) + ")"
    return text


__all__ = ["SCHEMA", "decide", "explain", "run"]
