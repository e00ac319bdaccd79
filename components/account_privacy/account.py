"""Prices what ran, from plan, ledger and round log, and signs the report.

Nothing is taken over from a number another step wrote: the mechanism is compared with the
configuration, its event recomputed, and the ledger verified before anything is said.
"""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedemb.config import RunConfig
from fedemb.documents.artifacts import file_digest, write_bytes, write_json
from fedemb.documents.evidence import Evidence, read_evidence
from fedemb.documents.privacy_report_schema import check_schema
from fedemb.errors import PlanMismatch
from fedemb.keys import open_key_store
from fedemb.keys.signatures import Signer, sign_document
from fedemb.ledger.ledger import open_ledger, read_reservation, read_trust
from fedemb.lineage import send, tree_lines, write_run
from fedemb.privacy.planning.plan_document import read_plan
from fedemb.reports.privacy_report import SCHEMA, build_report
from fedemb.reports.privacy_report_page import report_page
from fedemb.storage import open_store

_log = logging.getLogger(__name__)


def run(
    config: RunConfig,
    *,
    plan_path: Path,
    reservation_path: Path,
    model_dir: Path,
    users_manifest_path: Path,
    audit_path: Path,
    utility_path: Path,
    ledger_uri: str,
    keys_uri: str,
    report_path: Path,
    html_path: Path,
    lineage_path: Path,
    pretrained_dir: Path | None = None,
) -> dict[str, Any]:
    """Writes the signed privacy report, its page and the lineage of the run.

    Args:
      config: configuration of the run.
      plan_path: document of plan_privacy.
      reservation_path: document of reserve_budget.
      model_dir: artifact of train_dp_fedemb.
      users_manifest_path: document of partition_users.
      audit_path: document of audit_privacy.
      utility_path: document of evaluate_embeddings.
      ledger_uri: root of the ledgers.
      keys_uri: key store, for the signature.
      report_path: document to write.
      html_path: page to write.
      lineage_path: OpenLineage events to write.
      pretrained_dir: not needed: what it holds is bound through the digest of all inputs.

    Returns:
      The signed report.

    Raises:
      ArtifactError: a document is missing or broken.
      PlanMismatch: plan, reservation, model or rounds do not belong together.
      LedgerError: the ledger is broken, or the run is not committed there.
    """
    plan, plan_document = read_plan(plan_path, config)
    trust = read_trust(open_store(ledger_uri))
    ledger = open_ledger(ledger_uri, config.policy.policy_id, trust=trust)
    reservation = read_reservation(reservation_path, ledger.chain.trust)
    ledger.verify([reservation.anchor])
    evidence = read_evidence(
        config,
        plan_path=plan_path,
        reservation_path=reservation_path,
        users_manifest_path=users_manifest_path,
        model_dir=model_dir,
        audit_path=audit_path,
        utility_path=utility_path,
    )
    report = build_report(
        evidence,
        plan,
        ledger,
        time=datetime.now(UTC).isoformat(timespec="seconds"),
        head_sequence=ledger.head.sequence,
    )
    _same_run(evidence, report)
    check_schema(report)
    signer = Signer.current(open_key_store(keys_uri), "report", ledger.chain.trust)
    signed = sign_document(report, signer)
    write_json(report_path, SCHEMA, {key: signed[key] for key in signed if key != "schema"})
    steps = write_run(
        lineage_path,
        evidence,
        report_sha=file_digest(report_path),
        commitments=report["provenance"]["commitments"],
    )
    page = report_page(signed, ledger, plan_document["projections"], tree_lines(steps))
    write_bytes(html_path, page.encode())
    send(lineage_path.read_bytes)
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
