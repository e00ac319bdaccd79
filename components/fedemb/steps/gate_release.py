"""Allows a release, or raises with every reason and its remedy. The decision cannot be bypassed.

The decision is the pure function `fedemb.release.decide.decide`. This step reads the documents
strictly, calls the function, signs the verdict and raises on a denial. An unreadable document is a
reason for denial.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress

from kfp import dsl

from fedemb.config import FREE_SECTIONS, RunConfig
from fedemb.config.run import config_digest
from fedemb.documents.artifacts import Public
from fedemb.documents.evidence import Evidence, read_evidence, sentence_of
from fedemb.documents.privacy_report import PrivacyReport
from fedemb.documents.verdict import VerdictDocument
from fedemb.errors import AwaitingApproval, GateDenied, LedgerError, SignatureInvalid, StorageError
from fedemb.foundation.canonical_json import JsonObject
from fedemb.foundation.document import Fields, Written, read
from fedemb.foundation.files import write_bytes
from fedemb.keys import KeyStore
from fedemb.keys.trust import Signer, TrustStore, write_signed
from fedemb.ledger import Ledger
from fedemb.release.decide import applied_waivers, decide, given_approvals
from fedemb.release.rule import Reason, Verdict
from fedemb.reports.lineage import send, write_run
from fedemb.reports.report import render
from fedemb.runtime.step import Rights, leading_to, step
from fedemb.runtime.step_context import StepContext


@step(
    image="light",
    private=False,
    outputs={"verdict": Public, "verdict_page": Public, "lineage": Public},
    rights=Rights(ledger="read", signing=("gate",)),
)
def gate_release(
    config: str,
    ledger: str,
    keys: str,
    privacy_plan: dsl.Input[dsl.Artifact],
    reservation: dsl.Input[dsl.Artifact],
    users: dsl.Input[dsl.Dataset],
    model: dsl.Input[dsl.Model],
    privacy_report: dsl.Input[dsl.Artifact],
    audit_report: dsl.Input[dsl.Artifact],
    utility_report: dsl.Input[dsl.Artifact],
    verdict: dsl.Output[dsl.Artifact],
    verdict_page: dsl.Output[dsl.Markdown],
    lineage: dsl.Output[dsl.Artifact],
):
    """Recomputes, compares, and allows the release or raises."""
    from fedemb.runtime.step import step_process
    from fedemb.steps.gate_release import run

    with step_process("gate_release", locals()) as context:
        decision = run(context)
        verdict.metadata["allow"] = decision["allow"]


_log = logging.getLogger(__name__)


def run(context: StepContext) -> JsonObject:
    """Decides, writes the signed `verdict` and `verdict_page`, and raises on a denial.

    Also writes `lineage`, unless the evidence cannot be read. On a cluster, kfp keeps these outputs
    only if the gate allows; see `fedemb.runtime.step_context` for the outputs of a denied run.

    Returns:
      The verdict. A simulation gets `{"allow": false, "simulation": true}`: it is never released,
      and the step does not fail.

    Raises:
      AwaitingApproval: only approvals are missing.
      GateDenied: there are other reasons against the release.
      StorageError: a store cannot be reached; run again.
    """
    config, artifacts = context.config, context.artifacts
    report: Written[PrivacyReport] | None = None
    evidence: Evidence | None = None
    trust: TrustStore | None = None
    ledger: Ledger | None = None
    try:
        report = read(artifacts.privacy_report, PrivacyReport)
        evidence = read_evidence(config, artifacts)
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
        remedy = "run the step that writes it again"
        reason = Reason("evidence_unreadable", sentence_of(error), remedy)
        verdict = Verdict(False, (reason,), simulation=config.purpose == "simulation")
    document = _document(config, verdict, evidence, report, ledger)
    signed = write_signed(artifacts.verdict, document, _signer(context.keys, trust))
    write_bytes(artifacts.verdict_page, page(verdict, document).encode())
    denied = not verdict.allow and not verdict.simulation
    if evidence is not None and report is not None:
        write_run(
            artifacts.lineage,
            evidence,
            leading_to("gate_release"),
            report,
            verdict=signed.sha,
            verified=verdict.allow,
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


def _document(
    config: RunConfig,
    verdict: Verdict,
    evidence: Evidence | None,
    report: Written[PrivacyReport] | None,
    ledger: Ledger | None,
) -> VerdictDocument:
    fields: Fields = {
        "allow": verdict.allow,
        "simulation": verdict.simulation,
        "reasons": [reason.code for reason in verdict.reasons],
        "waived": list(verdict.waived),
        "config_sha": config_digest(config, *FREE_SECTIONS),
        "model_sha": None,
        "report_sha": None,
        "name": None,
        "version": None,
        "checks": list(verdict.checks),
        "waivers": [],
        "approvals": [],
        "approvals_needed": None,
        "ledger_sequence": None,
    }
    if evidence is not None and report is not None:
        model_sha, body = evidence.model.body.weights_sha, report.body
        name, version = config.released_as(body.run_id)
        fields |= {
            "model_sha": model_sha,
            "report_sha": report.sha,
            "name": name,
            "version": version,
        }
        with suppress(LedgerError, SignatureInvalid):  # a record breaks a rule, which denies
            if ledger is not None:
                fields |= {
                    "waivers": applied_waivers(ledger, verdict.waived, body),
                    "approvals": given_approvals(ledger, model_sha, report.sha, body.approve_by),
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
    return render("verdict.md.j2", state=state, reasons=verdict.reasons, verdict=document)


def explain(reasons: Sequence[Reason]) -> str:
    """Returns all reasons in one paragraph, the most important first."""
    first, *rest = reasons
    text = f"{first.sentence}; {first.remedy}"
    if rest:
        text += f" (and {len(rest)} more: " + "; ".join(item.sentence for item in rest) + ")"
    return text
