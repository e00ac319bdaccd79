"""Rules for the model and its audit."""

from __future__ import annotations

from collections.abc import Iterator

from fedemb.config.digest import config_digest
from fedemb.documents.audit import attack_on
from fedemb.documents.model_files import tensor_problem
from fedemb.gate.rule import Case, Charge, Rule

_AUDIT_AGAIN = "run audit_privacy on this model, then account_privacy"
_TRAINED = "use the model artifact of the training step"
_DID_NOT_RUN = "do not release; the priced mechanism did not run"


def _full_audit(case: Case) -> bool:
    return "full" in (case.config.policy.audit_level, case.ledger.terms.audit_level)


@Rule(
    "train with this version, or create a policy with audit_level: monitoring",
    applies=_full_audit,
)
def audit_full_missing(case: Case) -> Iterator[str]:
    """Evidence that the priced mechanism ran."""
    if case.audit.mechanism is None:
        yield "the policy requires audit_level: full, but the trainer wrote no evidence"


def _has_evidence(case: Case) -> bool:
    return case.audit.mechanism is not None


def _failed(case: Case, code: str) -> Iterator[str]:
    """Yields the failure of one part of the evidence."""
    if case.audit.mechanism is not None:
        failed = case.audit.mechanism.failed(case.plan)
        yield from (text for name, text in failed.items() if name == code)


@Rule(_DID_NOT_RUN, applies=_has_evidence)
def noise_receipt_failed(case: Case) -> Iterator[str]:
    """Full noise in the output of every round."""
    return _failed(case, "noise_receipt_failed")


@Rule(_DID_NOT_RUN, applies=_has_evidence)
def fold_differs(case: Case) -> Iterator[str]:
    """Weights follow from the noised outputs."""
    return _failed(case, "fold_differs")


@Rule(_DID_NOT_RUN, applies=_has_evidence)
def replay_differs(case: Case) -> Iterator[str]:
    """Rounds run again give the same outputs."""
    return _failed(case, "replay_differs")


@Rule(_AUDIT_AGAIN)
def audit_stale(case: Case) -> Iterator[str]:
    """Audit of this model, run and configuration."""
    audit, model, config = case.audit, case.model, case.config
    for name, found, wanted in (
        ("level", audit.level, "monitoring" if audit.mechanism is None else "full"),
        ("mechanism", audit.mechanism, model.mechanism_audit),
        ("attack", audit.attack, attack_on(config.task)),
        ("unit", audit.unit, config.policy.unit),
        ("model_sha", audit.model_sha, model.weights_sha),
        ("run_id", audit.run_id, case.reservation.run_id),
        ("config_sha", audit.config_sha, config_digest(config, "audit")),
        ("users_at_most", audit.users_at_most, config.audit.max_users),
        ("bootstrap_samples", audit.bootstrap_samples, config.audit.bootstrap_samples),
        ("split_by_value", audit.split_by_value, config.partition.evaluation.by == "value"),
    ):
        if found != wanted:
            yield f"the audit belongs to another {name}"


@Rule("fix components/audit_privacy")
def auditor_blind(case: Case) -> Iterator[str]:
    """Auditor passed its self-test."""
    if failed := case.audit.self_test.failed:
        yield f"the auditor failed its self-test ({', '.join(failed)}), so its finding is not valid"


@Rule(_AUDIT_AGAIN)
def audit_figures_open(case: Case) -> Iterator[str]:
    """No exact figures of training users."""
    if case.audit.figures != "private" or case.audit.measured is not None:
        yield "the audit report has exact figures of training users, without noise"


@Rule(_TRAINED)
def weights_differ(case: Case) -> Iterator[str]:
    """Weights that the trainer signed."""
    if case.model.weights_sha != case.evidence.model_files["backbone.keras"]:
        yield "the digest of the model file differs from model.json"


@Rule(_TRAINED)
def model_card_changed(case: Case) -> Iterator[str]:
    """Card of weights, tensors and noise key as signed at commit."""
    if case.commit.round_log.get("card_sha") != case.evidence.model.sha:
        yield "model.json differs from the one that the trainer signed at commit"


@Rule("save only the backbone, without head and optimizer slots")
def foreign_tensor(case: Case) -> Iterator[str]:
    """No tensor except the backbone's."""
    if problem := tensor_problem(case.evidence.tensors, case.model.tensors):
        yield problem


@Rule("run again without an injected key")
def key_injected(case: Case) -> Iterator[str]:
    """Noise and coins from the secret key of the reservation."""
    if case.model.key_injected or not case.report.mechanism.noise.secure:
        yield "noise or coins did not come from the secret key of the reservation"


@Rule("pretrain from public images", waivable=True).before_charge
def pretraining_overlap_unchecked(charge: Charge) -> Iterator[str]:
    """Public images compared with private images."""
    if charge.config.pretraining.kind == "import":
        yield "the training images of the imported backbone are unknown, perhaps private ones"
