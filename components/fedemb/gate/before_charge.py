"""Checks before the charge for causes that would make the gate deny the release.

`reserve_budget` calls `check_before_charge`, so that no budget is spent on a model that the gate
denies whatever the training result. `WHEN` lists for every reason code when its cause is known. A
test compares it with the codes in the rules.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

from fedemb.config import RunConfig
from fedemb.config.adjacency import covers_change_own_data
from fedemb.documents.ledger_record import ReleaseRecord
from fedemb.documents.model_files import stored_tensors, tensor_problem
from fedemb.errors import ArtifactError, BudgetExceeded, Refused
from fedemb.gate.privacy_rules import accountants_disagree
from fedemb.ledger import Ledger
from fedemb.privacy.accounting import accounting
from fedemb.privacy.mechanisms.mechanism import MechanismPlan
from fedemb.privacy.planning.prices import epsilon_rdp, guarantee_of

_log = logging.getLogger(__name__)

When = Literal["refused", "warned", "later"]
"""`refused`: the cause is known before the charge, and the run is refused then. `warned`: the cause
is known, but the policy owner may still waive the rule or a free section may change. `later`: the
cause depends on the training or on documents written after it."""

WHEN: Mapping[str, When] = {
    "report_unsigned": "later",
    "document_unsigned": "later",
    "ledger_broken": "refused",
    "report_before_commit": "later",
    "policy_differs": "refused",
    "block_over_cap": "refused",
    "reservation_invalid": "later",
    "not_committed": "later",
    "simulation": "later",
    "other_policy": "later",
    "not_what_was_reserved": "later",
    "inputs_differ": "later",
    "rounds_invalid": "later",
    "more_rounds_than_reserved": "later",
    "stopped_early": "later",
    "round_log_incomplete": "later",
    "round_log_changed": "later",
    "round_line_differs": "later",
    "mechanism_invalid": "refused",
    "no_proof": "refused",
    "event_differs": "later",
    "relation_differs": "later",
    "change_not_covered": "refused",
    "epsilon_invalid": "refused",
    "no_privacy": "refused",
    "epsilon_differs": "later",
    "epsilon_above_cap": "refused",
    "delta_too_large": "refused",
    "delta_above_customary": "warned",
    "accountants_disagree": "refused",
    "tuning_invalid": "later",
    "tuning_not_charged": "refused",
    "approvals_invalid": "later",
    "not_approved": "later",
    "no_approval_by_deadline": "later",
    "audit_invalid": "later",
    "audit_full_missing": "later",
    "audit_stale": "later",
    "auditor_blind": "later",
    "audit_figures_open": "later",
    "noise_receipt_failed": "later",
    "fold_differs": "later",
    "replay_differs": "later",
    "evidence_unreadable": "later",
    "model_invalid": "later",
    "weights_differ": "later",
    "model_card_changed": "later",
    "foreign_tensor": "refused",
    "key_invalid": "later",
    "key_injected": "later",
    "pretraining_invalid": "later",
    "pretraining_overlap_unchecked": "warned",
    "utility_invalid": "later",
    "utility_stale": "later",
    "utility_without_privacy": "refused",
    "no_gain_over_public": "later",
    "log_loss_above_baseline": "later",
    "worse_than_previous_release": "warned",
    "clock_invalid": "later",
    "clock_skewed": "later",
    "report_differs": "later",
}
"""Reason code -> when its cause is known. Some causes of a `later` code are refused before the
charge too: a public backbone that was not signed, or that has weights that are not finite."""


def check_before_charge(
    config: RunConfig,
    plan: MechanismPlan,
    ledger: Ledger,
    *,
    run_id: str,
    start: tuple[Path, str],
) -> None:
    """Refuses a release run that the gate would deny later, and warns of waivable reasons.

    `start` is the `.keras` file of the public backbone and the digest of its bytes.

    Raises:
      BudgetExceeded: this run alone is above the policy's cap.
      Refused: the gate would deny the run; the message has the first reason and the remedy.
      ArtifactError: the public backbone cannot be compared with a model.
      UnsupportedAccounting: the accounting library is too old.
    """
    for problem, remedy in _problems(config, plan, ledger, run_id):
        raise Refused(
            f"{problem}, so the gate would deny the release. Nothing was charged. Correct the "
            f"cause: {remedy}"
        )
    epsilon, cap = guarantee_of(plan, config.policy.delta).epsilon, ledger.terms.epsilon_cap
    if not epsilon <= cap:
        raise BudgetExceeded(
            f"epsilon={epsilon:.4g} is above the cap {cap:g} of policy {ledger.policy_id!r}, so "
            "nothing was charged; raise noise_multiplier, lower rounds or sampling_probability"
        )
    _check_start(*start)
    for warning in _warnings(config, ledger, run_id):
        _log.warning("the release will be refused unless this changes: %s", warning)


def _problems(
    config: RunConfig, plan: MechanismPlan, ledger: Ledger, run_id: str
) -> Iterator[tuple[str, str]]:
    """Yields each problem and its remedy, cheapest check first."""
    policy, terms = config.policy, ledger.terms
    if policy.covers_change_own_data and not covers_change_own_data(config, plan):
        yield (
            "policy.covers_change_own_data promises more than epsilon holds for",
            "take group_poisson_gaussian, hold users out by hash and name no cohort column, or "
            "leave the promise out",
        )
    others = len(ledger.state.committed_runs() - {run_id})
    if not config.tuning.private_runs <= others:
        yield (
            f"{config.tuning.private_runs} private runs were compared, but the ledger of "
            f"policy {policy.policy_id!r} has {others} other runs",
            "tune under this policy, or on public images",
        )
    if not (plan.private and plan.proof):
        yield (
            f"mechanism {plan.kind} under {plan.relation.name} has no proven guarantee",
            "use another mechanism",
        )
    if not 0 < policy.delta < 1 / terms.users_lower_bound:
        yield (
            f"policy.delta={policy.delta:g} is not below 1/{terms.users_lower_bound}",
            "lower policy.delta and create a new policy",
        )
    accounting.library_version()
    guarantee = guarantee_of(plan, policy.delta)
    if not 0 < guarantee.epsilon < math.inf:
        yield (
            f"epsilon is {guarantee.epsilon}, which guarantees nothing",
            "use a mechanism with noise",
        )
    renyi = epsilon_rdp(plan, policy.delta)
    if guarantee.accountant == "pld" and accountants_disagree(guarantee.epsilon, renyi):
        yield (
            f"RDP gives epsilon={renyi}, PLD {guarantee.epsilon:.4g}, and PLD should not be above",
            "report this as a bug of the accounting",
        )


def _is_released(ledger: Ledger, name: str, version: str, run_id: str) -> bool:
    """Returns whether another run was released under this name and version."""
    return any(
        (release.name, release.version) == (name, version)
        for attempt in ledger.state.attempts.values()
        if attempt.reserve.run_id != run_id
        for release in (record.content(ReleaseRecord) for record in attempt.releases)
    )


def _check_start(path: Path, sha: str) -> None:
    """Refuses a public backbone whose models cannot pass the rules about weights and tensors.

    Raises:
      ArtifactError: the file cannot be read without Keras, has a tensor that no backbone has, or
        NaN or infinite weights.
    """
    try:
        tensors = stored_tensors(path, sha)
    except ArtifactError as error:
        raise ArtifactError(f"{error}. Nothing was charged") from error
    problem = tensor_problem(tensors, tensors)
    if problem:
        raise ArtifactError(
            f"the public backbone cannot be released: {problem}. Nothing was charged. Use another "
            "backbone"
        )


def _warnings(config: RunConfig, ledger: Ledger, run_id: str) -> Iterator[str]:
    """Yields reasons that a waiver or a change in a free section can still remove."""
    customary = ledger.terms.users_lower_bound**-1.1
    if not config.policy.delta <= customary:
        yield (
            f"delta_above_customary: policy.delta={config.policy.delta:g} is above "
            f"users_lower_bound**-1.1={customary:.3g}; the policy owner can waive it for one model"
        )
    if config.pretraining.kind == "import":
        yield (
            "pretraining_overlap_unchecked: the images behind the imported backbone are not known, "
            "so private images may be among them; the policy owner can waive it for one model"
        )
    if config.release.no_worse_than and config.evaluation.previous_release is None:
        yield (
            "worse_than_previous_release: release.no_worse_than is set and "
            "evaluation.previous_release is null; set it to the release to compare with"
        )
    name, version = config.released_as(run_id)
    if _is_released(ledger, name, version, run_id):
        yield f"{name} {version} is released already; set another release.version"
