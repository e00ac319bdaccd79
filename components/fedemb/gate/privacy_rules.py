"""Rules for the guarantee: mechanism, event, epsilon and delta; most also before the charge."""

from __future__ import annotations

import math
from collections.abc import Iterator

from fedemb.config.adjacency import covers_change_own_data
from fedemb.gate.rule import Case, Charge, Rule
from fedemb.privacy.accounting.events import event_to_json
from fedemb.privacy.mechanisms.registry import MECHANISMS
from fedemb.privacy.planning.prices import epsilon_rdp

RDP_TOLERANCE = 0.02
"""Maximum share by which PLD may exceed RDP, for its discretisation; a larger gap is a bug."""


@Rule(f"use another mechanism; {next(iter(MECHANISMS))} is the default").before_charge
def no_proof(charge: Charge) -> Iterator[str]:
    """Mechanism with a proven guarantee."""
    plan = charge.plan
    if not (plan.private and plan.proof):
        yield f"mechanism {plan.kind} under {plan.relation.name} has no proven guarantee"


@Rule()
def event_differs(case: Case) -> Iterator[str]:
    """Plan, report and reservation of one event, as recomputed."""
    event = event_to_json(case.plan.event())
    documents = (case.report.accounting, case.reservation, case.evidence.plan.body)
    if any(document.event != event for document in documents):
        yield "the event of plan, report or reservation differs from the recomputed event"


@Rule()
def relation_differs(case: Case) -> Iterator[str]:
    """Charged under the neighbouring relation of the plan."""
    if case.reservation.relation != case.plan.relation.name:
        yield "the reservation charged another neighbouring relation"


@Rule(
    "use group_poisson_gaussian, hold users out by hash and set no cohort column, or create a "
    "policy with covers_change_own_data: false",
    applies=lambda case: case.config.policy.covers_change_own_data,
).before_charge
def change_not_covered(charge: Charge) -> Iterator[str]:
    """Guarantee for users who change their own data, as promised."""
    promised = charge.config.policy.covers_change_own_data
    if promised and not covers_change_own_data(charge.config, charge.plan):
        yield (
            "policy.covers_change_own_data is true, but epsilon does not hold for users who change "
            "their own data"
        )


@Rule(
    "lower policy.delta and create a new policy",
    value=lambda case: f"delta {case.config.policy.delta:g}",
    limit=lambda case: f"below 1/{case.ledger.terms.users_lower_bound}",
).before_charge
def delta_too_large(charge: Charge) -> Iterator[str]:
    """Delta of the policy, below one over the number of users."""
    delta, terms = charge.config.policy.delta, charge.ledger.terms
    if not (0 < delta < 1 / terms.users_lower_bound) or delta != terms.delta:
        yield f"delta={delta:g} is not below 1/{terms.users_lower_bound}, or not the policy's"


@Rule("create a new policy with a lower policy.delta", waivable=True).before_charge
def delta_above_customary(charge: Charge) -> Iterator[str]:
    """Delta of the customary size, users_lower_bound^-1.1."""
    delta, customary = charge.config.policy.delta, charge.ledger.terms.users_lower_bound**-1.1
    if not delta <= customary:
        yield f"delta={delta:g} is above users_lower_bound**-1.1={customary:.3g}"


@Rule("use a mechanism with noise").before_charge
def no_privacy(charge: Charge) -> Iterator[str]:
    """Epsilon above 0 and finite."""
    epsilon = charge.guarantee.epsilon
    if not 0 < epsilon < math.inf:
        yield f"epsilon is {epsilon}, which guarantees nothing"


@Rule()
def epsilon_differs(case: Case) -> Iterator[str]:
    """Epsilon of the report as recomputed."""
    epsilon, claimed = case.charge.guarantee.epsilon, case.report.accounting.epsilon
    if not (claimed is not None and abs(claimed - epsilon) <= 0.01 * epsilon):
        yield f"the report has epsilon={claimed}, but the recomputed value is {epsilon:.6g}"


@Rule(
    "raise noise_multiplier, lower rounds or sampling_probability",
    value=lambda case: f"epsilon {case.charge.guarantee.epsilon:.4g}",
    limit=lambda case: f"at most {case.ledger.terms.epsilon_cap:g}",
).before_charge
def epsilon_above_cap(charge: Charge) -> Iterator[str]:
    """Epsilon of this run within the cap."""
    epsilon, policy = charge.guarantee.epsilon, charge.config.policy
    cap = charge.ledger.terms.epsilon_cap
    if not epsilon <= cap:
        yield (
            f"epsilon={epsilon:.4g} at delta={policy.delta:g} is above the cap {cap:g} of policy "
            f"{policy.policy_id!r}"
        )


@Rule(
    "report this as a bug of the accounting",
    applies=lambda case: case.charge.guarantee.accountant == "pld",
).before_charge
def accountants_disagree(charge: Charge) -> Iterator[str]:
    """Epsilon by PLD, the tighter bound, not above that by RDP."""
    guarantee, renyi = charge.guarantee, epsilon_rdp(charge.plan, charge.config.policy.delta)
    upper = math.inf if renyi is None else renyi
    if guarantee.accountant == "pld" and not upper >= (1 - RDP_TOLERANCE) * guarantee.epsilon:
        yield f"epsilon by RDP is {renyi}, below {guarantee.epsilon:.4g} by PLD"


@Rule(
    "tune under this policy, or on public images",
    applies=lambda case: case.config.tuning.private_runs != 0,
).before_charge
def tuning_not_charged(charge: Charge) -> Iterator[str]:
    """Private runs that chose the hyperparameters charged."""
    runs = charge.config.tuning.private_runs
    if not runs <= charge.other_runs:
        yield (
            f"{runs} private runs were compared to choose the hyperparameters, but the ledger "
            f"has {charge.other_runs} other runs before this one"
        )
