"""Gate rules for the guarantee: ledger, reservation, mechanism, epsilon and delta."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from fedemb.config.adjacency import covers_change_own_data
from fedemb.gate.case import RERUN, Case, Reason, waiver
from fedemb.ledger import Anchor, terms_of
from fedemb.ledger.records import check_record
from fedemb.privacy.accounting import accounting
from fedemb.privacy.accounting.events import event_to_json
from fedemb.privacy.mechanisms.registry import MECHANISMS
from fedemb.privacy.planning.prices import epsilon_rdp, guarantee_of
from fedemb.reports.privacy_report import block_table

RDP_TOLERANCE = 0.02
"""Maximum share by which PLD may exceed RDP, for its discretisation; a larger gap is a bug."""


def ledger(case: Case) -> Iterator[Reason]:
    """Checks that the ledger is intact and has the report's head, and no block exceeds its cap."""
    report, terms, head = case.report.cumulative, case.ledger.terms, case.head
    anchor = Anchor(head, report.ledger_head, "the privacy report")
    case.ledger.verify([anchor])
    commit = case.attempt.commit
    if commit is not None and not head >= commit.sequence:
        yield Reason(
            "report_before_commit",
            "the report was made before the training was committed",
            RERUN,
        )
    for block in case.reservation.blocks:
        for spent in (block_table(case.ledger, head)[block], case.ledger.spent(block)):
            if not spent.epsilon <= terms.epsilon_cap:
                yield Reason(
                    "block_over_cap",
                    f"block {block!r} has spent epsilon={spent.epsilon:.4g} of its cap "
                    f"{terms.epsilon_cap:g}",
                    "use other blocks; no model of this block can be released",
                )
    asked = terms_of(case.evidence.config, terms.series)
    if not case.same_environment:  # a bundle does not contain the store addresses
        asked = replace(asked, rollback_anchor_sha=terms.rollback_anchor_sha)
    for difference in terms.differences(asked):
        yield Reason(
            "policy_differs",
            difference,
            "use the terms of the policy, or create a new policy",
        )


def reservation(case: Case) -> Iterator[Reason]:
    """Checks that the reservation is signed, in the ledger, committed, and for a release."""
    check_record(case.evidence.reservation, case.ledger.chain.trust)
    attempt, config = case.attempt, case.evidence.config
    if attempt.void or attempt.bind is None or attempt.commit is None:
        yield Reason(
            "not_committed",
            f"run {case.reservation.run_id!r} is {attempt.status} in the ledger, not committed",
            "finish the training, which commits as its last act",
        )
    if case.reservation.purpose != "release" or config.purpose != "release":
        yield Reason(
            "simulation",
            "the budget was reserved for a simulation, which can never be released",
            "run again with purpose: release",
        )
    if case.reservation.policy_id != config.policy.policy_id:
        yield Reason(
            "other_policy",
            "the reservation belongs to another policy than the configuration",
            "run again with the policy of the reservation",
        )


def mechanism(case: Case) -> Iterator[Reason]:
    """Checks that the mechanism is proven, its event is the plan's, and an accountant is valid."""
    plan = case.plan
    if not (plan.private and plan.proof):
        yield Reason(
            "no_proof",
            f"mechanism {plan.kind} under {plan.relation.name} has no proven guarantee",
            f"use another mechanism; {next(iter(MECHANISMS))} is the default",
        )
    event = event_to_json(plan.event())
    documents = (case.report.accounting, case.reservation, case.evidence.plan.body)
    if any(document.event != event for document in documents):
        yield Reason(
            "event_differs",
            "the event of plan, report or reservation differs from the recomputed event",
            RERUN,
        )
    if case.reservation.relation != plan.relation.name:
        yield Reason(
            "relation_differs", "the reservation charged another neighbouring relation", RERUN
        )
    promised = case.evidence.config.policy.covers_change_own_data
    if promised and not covers_change_own_data(case.evidence.config, plan):
        yield Reason(
            "change_not_covered",
            "policy.covers_change_own_data is true, but epsilon does not hold for users who change "
            "their own data",
            "use group_poisson_gaussian, hold users out by hash and set no cohort column, or "
            "create a policy with covers_change_own_data: false",
        )
    accounting.library_version()


def epsilon(case: Case) -> Iterator[Reason]:
    """Checks that recomputed epsilon and delta are within the policy."""
    plan, policy, terms = case.plan, case.evidence.config.policy, case.ledger.terms
    guarantee = guarantee_of(plan, policy.delta)
    epsilon, claimed = guarantee.epsilon, case.report.accounting.epsilon
    if not (0 < epsilon < math.inf):
        yield Reason(
            "no_privacy",
            f"epsilon is {epsilon}, which guarantees nothing",
            "use a mechanism with noise",
        )
    if not (claimed is not None and abs(claimed - epsilon) <= 0.01 * epsilon):
        yield Reason(
            "epsilon_differs",
            f"the report has epsilon={claimed}, but the recomputed value is {epsilon:.6g}",
            RERUN,
        )
    if not epsilon <= terms.epsilon_cap:
        yield Reason(
            "epsilon_above_cap",
            f"epsilon={epsilon:.4g} at delta={policy.delta:g} is above the cap "
            f"{terms.epsilon_cap:g} of policy {policy.policy_id!r}",
            "raise noise_multiplier, lower rounds or sampling_probability",
        )
    if not (0 < policy.delta < 1 / terms.users_lower_bound) or policy.delta != terms.delta:
        yield Reason(
            "delta_too_large",
            f"delta={policy.delta:g} is not below 1/{terms.users_lower_bound}, or not the policy's",
            "lower policy.delta and create a new policy",
        )
    customary = terms.users_lower_bound**-1.1
    if not policy.delta <= customary:
        yield Reason(
            "delta_above_customary",
            f"delta={policy.delta:g} is above users_lower_bound**-1.1={customary:.3g}",
            "create a new policy with a lower policy.delta, or let the policy owner "
            + waiver("delta_above_customary"),
        )
    renyi = epsilon_rdp(plan, policy.delta)
    if guarantee.accountant == "pld" and accountants_disagree(epsilon, renyi):
        yield Reason(
            "accountants_disagree",
            f"epsilon by RDP is {renyi}, below {epsilon:.4g} by PLD, which is the tighter bound",
            "report this as a bug of the accounting",
        )


def accountants_disagree(pld: float, renyi: float | None) -> bool:
    """Returns whether the epsilon by PLD exceeds that by RDP by more than `RDP_TOLERANCE`."""
    upper = math.inf if renyi is None else renyi
    return not upper >= (1 - RDP_TOLERANCE) * pld


def approvals(case: Case) -> Iterator[Reason]:
    """Checks that the required number of people approved this model with exactly this report."""
    needed = case.ledger.terms.approvals
    model = case.evidence.model.body.weights_sha
    deadline = case.report.approve_by
    given = case.ledger.state.approvals_of(model, case.signed.sha, deadline)
    if not len(given) >= needed:
        counted = f"{len(given)}{''.join(f', by {record.actor}' for record in given)}"
        required = f"the policy requires {needed} approvals of report {case.signed.sha[:12]}"
        if deadline is not None and not case.now <= deadline:
            yield Reason(
                "no_approval_by_deadline",
                f"no approval by {deadline:%Y-%m-%d %H:%M} UTC: {required}, and the ledger had "
                f"{counted} at the deadline",
                "start a new run; later approvals of this report do not count",
            )
        else:
            yield Reason(
                "not_approved",
                f"{required}, and the ledger has {counted}",
                "ask the approvers to read the report and run `fedemb approve`, then resume with "
                "`fedemb run --resume RUN --from gate_release`",
            )


def tuning(case: Case) -> Iterator[Reason]:
    """Checks that the private runs that chose the hyperparameters are charged."""
    runs, found = case.evidence.config.tuning.private_runs, case.report.tuning.other_runs_before
    if not runs <= found:
        yield Reason(
            "tuning_not_charged",
            f"{runs} private runs were compared to choose the hyperparameters, but the ledger "
            f"has {found} other runs before this one",
            "tune under this policy, or on public images",
        )
