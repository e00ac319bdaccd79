"""Rules about the model, its utility, and the report as a whole."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta

from fedemb.config.run import config_digest
from fedemb.documents.audit import attack_on
from fedemb.documents.fields import points
from fedemb.documents.model import tensor_problem
from fedemb.documents.utility import (
    LEAST_RESAMPLED,
    ClassifierReport,
    UtilityReport,
    baselines_of,
    embedding_space_id,
    rate_name,
)
from fedemb.release.privacy_report import build_report
from fedemb.release.rule import LATER_TOLERANCE, RELATIVE_TOLERANCE, Case, Charge, Rule, differences

_AUDIT_AGAIN = "run audit_privacy on this model, then account_privacy"
_TRAINED = "use the model artifact of the training step"
_DID_NOT_RUN = "do not release; the priced mechanism did not run"


@Rule("train with noise, by this version")
def audit_full_missing(case: Case) -> Iterator[str]:
    """Evidence that the priced mechanism ran."""
    if case.audit.mechanism is None:
        yield "the trainer wrote no evidence"


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
    if case.model.key_injected or not case.report.mechanism.noise_secure:
        yield "noise or coins did not come from the secret key of the reservation"


@Rule(
    "pretrain from public images",
    waivable=True,
    applies=lambda case: case.config.pretraining.kind != "none",
).before_charge
def pretraining_overlap_unchecked(charge: Charge) -> Iterator[str]:
    """Public images compared with private images."""
    if charge.config.pretraining.kind == "import":
        yield "the training images of the imported backbone are unknown, perhaps private ones"


_BETTER = "train on more data, with less noise or from a better public backbone"


_EVALUATE = "run the evaluation of this release on its model, then account_privacy"


@Rule(_EVALUATE)
def utility_stale(case: Case) -> Iterator[str]:
    """Utility of this model, measured as configured."""
    utility, model, config = case.utility, case.model, case.config
    wanted: dict[str, tuple[object, object]] = {
        "model_sha": (utility.model_sha, model.weights_sha),
        "run_id": (utility.run_id, case.reservation.run_id),
        "config_sha": (utility.config_sha, config_digest(config, "evaluation")),
        "public_kind": (utility.public_kind, config.pretraining.kind),
    }
    if isinstance(utility, UtilityReport):
        wanted |= _embeddings_wanted(utility, case)
    else:
        samples = config.evaluation.bootstrap_samples
        wanted |= {
            "bootstrap_samples": (utility.bootstrap_samples, samples),
            "unit": (utility.unit, config.policy.unit),
            "classes": (utility.classes, len(config.model.classes)),
        }
    if utility.measured:
        wanted["starts"] = (set(utility.measured_baselines), set(baselines_of(config)))
    for name, (found, expected) in wanted.items():
        if found != expected:
            yield f"the utility report belongs to another {name}"


def _embeddings_wanted(utility: UtilityReport, case: Case) -> dict[str, tuple[object, object]]:
    config = case.config
    rates = [rate_name(rate) for rate in config.evaluation.false_accept_rates]
    depths = {str(depth) for depth in config.evaluation.recall_at}
    space = embedding_space_id(case.model.weights_sha, config.model)
    wanted: dict[str, tuple[object, object]] = {
        "embedding_space_id": (utility.embedding_space_id, space),
        "bootstrap.samples": (utility.bootstrap.samples, config.evaluation.bootstrap_samples),
    }
    if not config.evaluation.resample_subgroups:
        wanted["bootstrap.groups"] = (utility.bootstrap.groups, None)
    if utility.retrieval is not None:
        wanted["headline_rate"] = (utility.headline_rate, rates[0])
        wanted["recall_at_far"] = (set(utility.recall_at_far), set(rates))
        wanted["retrieval.recall_at"] = (set(utility.retrieval.recall_at), depths)
    return wanted


@Rule(_EVALUATE)
def utility_without_privacy(case: Case) -> Iterator[str]:
    """No figures of a model trained without privacy."""
    utility = case.utility
    drop = isinstance(utility, UtilityReport) and utility.utility_drop
    if utility.simulation or utility.centralized or drop:
        yield "the utility report has figures of a model trained without privacy"


@Rule(
    _BETTER,
    waivable=True,
    applies=lambda case: case.config.release.min_gain_over_public is not None,
    value=lambda case: points(case.utility.gain),
    limit=lambda case: f"above {100 * (case.config.release.min_gain_over_public or 0):g} points",
)
def no_gain_over_public(case: Case) -> Iterator[str]:
    """Interval of the gain over the best baseline above its floor."""
    utility, gain = case.utility, case.utility.gain
    least = case.config.release.min_gain_over_public
    found = f"the gain over the best baseline ({utility.best_baseline}) is {points(gain)}"
    if gain is not None and utility.resampled < LEAST_RESAMPLED:
        few = f"{utility.resampled}, fewer than {LEAST_RESAMPLED}"
        yield f"{found}, from too few held-out users for an interval: {few}"
    elif gain is None or least is None or not gain.low > least:
        yield f"{found}; its interval must be above the floor (release.min_gain_over_public)"


@Rule(
    "lower training.server.learning_rate, or train with less noise",
    waivable=True,
    applies=lambda case: isinstance(case.utility, ClassifierReport) and case.utility.measured,
)
def log_loss_above_baseline(case: Case) -> Iterator[str]:
    """Log loss not significantly above that of the best baseline.

    Chance gives every class the same probability. A classifier above its log loss is certain where
    it is wrong.
    """
    utility = case.utility
    assert isinstance(utility, ClassifierReport)
    own, best = utility.log_loss("model"), utility.best_log_loss
    if own is None or best is None or not own.low <= best:
        found = "not measured" if own is None or best is None else f"{own.value:.3g}"
        yield (
            f"the log loss is {found}, and the best baseline has "
            f"{'none' if best is None else format(best, '.3g')}: the probabilities are not useful"
        )


@Rule(
    _BETTER,
    waivable=True,
    applies=lambda case: case.config.release.no_worse_than is not None,
    value=lambda case: points(case.utility.difference("previous_release")),
)
def worse_than_previous_release(case: Case) -> Iterator[str]:
    """Not significantly worse than the previous release."""
    change = case.utility.difference("previous_release")
    if change is None or not change.high >= 0:
        yield f"the change since the previous release is {points(change)} (release.no_worse_than)"


CLOCK_TOLERANCE = timedelta(minutes=10)


@Rule(
    "correct the clocks, then run account_privacy again; a wrong date of the commit needs a waiver",
    waivable=True,
)
def clock_skewed(case: Case) -> Iterator[str]:
    """Report dated after the commit and not in the future."""
    made, commit = datetime.fromisoformat(case.report.time), case.attempt.commit
    earliest = datetime.fromisoformat(commit.time) if commit else made
    if not earliest - CLOCK_TOLERANCE <= made <= case.now + CLOCK_TOLERANCE:
        yield "the time of the report is before the commit or in the future"


@Rule()
def report_differs(case: Case) -> Iterator[str]:
    """Report as rebuilt from the evidence, field by field."""
    report, tolerance = case.report, RELATIVE_TOLERANCE
    built = build_report(
        case.evidence, case.plan, case.ledger, time=report.time, head_sequence=case.head
    )
    if not case.same_environment:
        tolerance = LATER_TOLERANCE
        accounting = built.accounting.model_copy(update={"version": report.accounting.version})
        built = built.model_copy(update={"accounting": accounting})
    for path in differences(built.content(), case.signed.content, tolerance=tolerance):
        yield f"{path} of the report differs from the value that the evidence gives"


# Approvals come last, so that people review only runs that pass all other rules.


def _overdue(case: Case) -> bool:
    deadline = case.report.approve_by
    return deadline is not None and not case.now <= deadline


def _given(case: Case) -> str:
    return f"{len(case.approvals)}{''.join(f', by {actor}' for actor in case.approvals)}"


def _needed(case: Case) -> str:
    return f"{case.ledger.terms.approvals} approvals of report {case.signed.sha[:12]}"


@Rule(
    "start a new run; later approvals of this report do not count",
    applies=lambda case: case.report.approve_by is not None,
    limit=lambda case: f"{case.report.approve_by:%Y-%m-%d %H:%M} UTC",
)
def no_approval_by_deadline(case: Case) -> Iterator[str]:
    """Approved by the deadline."""
    if _overdue(case) and not len(case.approvals) >= case.ledger.terms.approvals:
        yield (
            f"no approval by {case.report.approve_by:%Y-%m-%d %H:%M} UTC: the policy requires "
            f"{_needed(case)}, and the ledger had {_given(case)} at the deadline"
        )


@Rule(
    "ask the approvers to read the report and run `fedemb approve RUN`. With `--host` the last "
    "approval releases on the cluster; elsewhere run `fedemb run --resume RUN --from gate_release`",
    applies=lambda case: case.ledger.terms.approvals != 0,
    value=_given,
    limit=_needed,
)
def not_approved(case: Case) -> Iterator[str]:
    """Approved by the required number of people, with exactly this report."""
    if not _overdue(case) and not len(case.approvals) >= case.ledger.terms.approvals:
        yield f"the policy requires {_needed(case)}, and the ledger has {_given(case)}"
