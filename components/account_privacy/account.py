"""Prices what ran, from plan, ledger and round log, and signs the report.

Nothing is taken over from a number another step wrote: the mechanism is compared with the
configuration, its event recomputed, and the ledger verified before anything is said.
"""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from typing import Any

from fedemb.documents.artifacts import file_digest, write_bytes, write_json
from fedemb.documents.evidence import Evidence, read_evidence
from fedemb.documents.privacy_report_schema import check_schema
from fedemb.errors import PlanMismatch
from fedemb.keys.signatures import Signer, sign_document
from fedemb.ledger.ledger import read_reservation
from fedemb.lineage import send, write_run
from fedemb.privacy.planning.plan_document import read_plan
from fedemb.reports.privacy_report import SCHEMA, build_report
from fedemb.reports.privacy_report_page import report_page
from fedemb.step_context import StepContext

_log = logging.getLogger(__name__)


def run(context: StepContext) -> dict[str, Any]:
    """Writes the signed `privacy_report`, `privacy_page` and the `lineage` of the run.

    What the public start holds is not read: the digest of all inputs binds it.

    Returns:
      The signed report.

    Raises:
      ArtifactError: a document is missing or broken.
      PlanMismatch: plan, reservation, model or rounds do not belong together.
      LedgerError: the ledger is broken, or the run is not committed there.
    """
    config, artifacts, ledger = context.config, context.artifacts, context.ledger
    plan, plan_document = read_plan(artifacts.privacy_plan, config)
    reservation = read_reservation(artifacts.reservation, ledger.chain.trust)
    ledger.verify([reservation.anchor])
    evidence = read_evidence(config, artifacts)
    report = build_report(
        evidence,
        plan,
        ledger,
        time=datetime.now(UTC).isoformat(timespec="seconds"),
        head_sequence=ledger.head.sequence,
    )
    _same_run(evidence, report)
    check_schema(report)
    signer = Signer.current(context.keys, "report", ledger.chain.trust)
    signed = sign_document(report, signer)
    write_json(
        artifacts.privacy_report, SCHEMA, {key: signed[key] for key in signed if key != "schema"}
    )
    steps = write_run(
        artifacts.lineage,
        evidence,
        report_sha=file_digest(artifacts.privacy_report),
        commitments=report["provenance"]["commitments"],
    )
    page = report_page(signed, ledger, plan_document["projections"], steps)
    write_bytes(artifacts.privacy_page, page.encode())
    send(artifacts.lineage.read_bytes)
    _log.info("guarantee: %s", report["guarantee"]["sentence"])
    return signed


def _same_run(evidence: Evidence, report: dict[str, Any]) -> None:
    """Refuses to price a model that is not of this run; the gate looks closer."""
    model, provenance = evidence.model.body, report["provenance"]
    pairs = {
        "run_id": (model.get("run_id"), report["run_id"]),
        "attempt": (model.get("attempt"), report["attempt"]),
        "plan_sha": (model.get("plan_sha"), provenance["plan_sha"]),
        "config_sha": (model.get("config_sha"), provenance["config_sha"]),
        "inputs_sha": (model.get("inputs_sha"), provenance["inputs_sha"]),
        "rounds": (model.get("rounds_run"), report["mechanism"]["rounds_run"]),
    }
    for name, (found, wanted) in pairs.items():
        if found != wanted:
            raise PlanMismatch(
                f"the model's {name} is {found!r}, the ledger holds {wanted!r} for this run; take "
                "all artifacts from one run"
            )
