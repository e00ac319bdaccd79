"""Computes the privacy loss of a run from plan, ledger and round log, and signs the report.

No number of another step is trusted: the mechanism is compared with the configuration, its event is
recomputed, and the ledger is verified first.
"""

from __future__ import annotations

import logging
from datetime import datetime

from kfp import dsl

from fedemb.documents.artifacts import Public
from fedemb.documents.evidence import Evidence, read_evidence
from fedemb.documents.plan import read_plan
from fedemb.documents.privacy_report import PrivacyReport
from fedemb.errors import PlanMismatch
from fedemb.foundation.document import Written
from fedemb.foundation.files import write_bytes
from fedemb.keys.trust import Signer, write_signed
from fedemb.ledger import read_reservation
from fedemb.release.privacy_report import build_report
from fedemb.reports.lineage import send, write_run
from fedemb.reports.pages import report_page
from fedemb.reports.privacy_text import report_sentence
from fedemb.runtime.step import Rights, leading_to, step
from fedemb.runtime.step_context import StepContext


@step(
    image="light",
    private=False,
    outputs={
        "privacy_report": Public,
        "privacy_page": Public,
        "lineage": Public,
        "metrics": Public,
    },
    rights=Rights(ledger="read", signing=("report",)),
)
def account_privacy(
    config: str,
    ledger: str,
    keys: str,
    privacy_plan: dsl.Input[dsl.Artifact],
    reservation: dsl.Input[dsl.Artifact],
    users: dsl.Input[dsl.Dataset],
    model: dsl.Input[dsl.Model],
    audit_report: dsl.Input[dsl.Artifact],
    utility_report: dsl.Input[dsl.Artifact],
    privacy_report: dsl.Output[dsl.Artifact],
    privacy_page: dsl.Output[dsl.HTML],
    lineage: dsl.Output[dsl.Artifact],
    metrics: dsl.Output[dsl.Metrics],
):
    """Prices what ran from plan, ledger and round records, and signs the report."""
    from fedemb.reports.headline import privacy_figures
    from fedemb.runtime.step import step_process
    from fedemb.steps.account_privacy import run

    with step_process("account_privacy", locals()) as context:
        report = run(context).body
        for name, value in privacy_figures(report).items():
            metrics.log_metric(name, value)
        accounting = report.accounting
        privacy_report.metadata.update(epsilon=accounting.epsilon, delta=accounting.delta)


_log = logging.getLogger(__name__)


def run(context: StepContext) -> Written[PrivacyReport]:
    """Writes the signed `privacy_report`, `privacy_page` and the `lineage` of the run.

    The content of the public backbone is not read: the digest of all inputs binds it.

    Raises:
      ArtifactError: a document is missing or broken.
      PlanMismatch: plan, reservation, model or rounds do not match.
      SignatureInvalid: a document is not signed by the step that writes it.
      LedgerError: the ledger is broken, or does not contain the commit of the run.
    """
    config, artifacts, ledger = context.config, context.artifacts, context.ledger
    plan, _ = read_plan(artifacts.privacy_plan, config)
    reservation = read_reservation(artifacts.reservation, ledger.chain.trust)
    ledger.verify([reservation.anchor])
    evidence = read_evidence(config, artifacts)
    for document, at in evidence.trusted_at(reservation.sequence, ledger.head.sequence):
        ledger.chain.trust.check(document, at=at)
    report = build_report(
        evidence,
        plan,
        ledger,
        time=ledger.head.time,  # not the clock: made twice, it is the same report to the byte
        head_sequence=ledger.head.sequence,
    )
    _same_run(evidence, report)
    signer = Signer.current(context.keys, "report", ledger.chain.trust)
    signed = write_signed(artifacts.privacy_report, report, signer)
    steps, time = leading_to("account_privacy"), datetime.fromisoformat(report.time)
    write_run(artifacts.lineage, evidence, steps, signed, time=time)
    write_bytes(artifacts.privacy_page, report_page(signed, evidence, ledger, steps).encode())
    send(artifacts.lineage.read_bytes)
    _log.info("guarantee: %s", report_sentence(report))
    return signed


def _same_run(evidence: Evidence, report: PrivacyReport) -> None:
    """Rejects documents of another run; the gate performs the full check."""
    model, provenance = evidence.model.body, report.provenance
    measured = {"audit": evidence.audit.body, "utility": evidence.utility.body}
    pairs = {
        "run_id": (model.run_id, report.run_id),
        "attempt": (model.attempt, report.attempt),
        "plan_sha": (model.plan_sha, provenance.plan_sha),
        "config_sha": (model.config_sha, provenance.config_sha),
        "inputs_sha": (model.inputs_sha, provenance.inputs_sha),
        "rounds": (model.rounds_run, report.mechanism.rounds_run),
        "users": (evidence.users.body.run_id, report.run_id),
        **{
            name: ((body.run_id, body.model_sha), (report.run_id, model.weights_sha))
            for name, body in measured.items()
        },
    }
    for name, (found, wanted) in pairs.items():
        if found != wanted:
            raise PlanMismatch(
                f"{name} of the model, its users or its reports is {found!r}, expected "
                f"{wanted!r}. Use artifacts of one run only."
            )
