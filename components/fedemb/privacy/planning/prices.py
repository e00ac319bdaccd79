"""All privacy figures of a plan: the guarantee and the comparison figures, cached.

Plan, report and gate use this module, so that each figure is computed in one way. Several gate
rules price the same event, and each event is priced once.
"""

# dp-accounting ships no types.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import functools
import json
import math

from dp_accounting.privacy_accountant import NeighboringRelation

from fedemb.foundation.canonical_json import JsonObject, canonical_json
from fedemb.privacy.accounting import accounting
from fedemb.privacy.accounting.accounting import AccountantName, upper_bound
from fedemb.privacy.accounting.attack_rates import attack_rates
from fedemb.privacy.accounting.events import event_from_json, event_to_json
from fedemb.privacy.accounting.guarantee import PrivacyGuarantee
from fedemb.privacy.accounting.units import Unit
from fedemb.privacy.mechanisms.mechanism import MechanismPlan

CURVE_DELTAS = tuple(10.0**-exponent for exponent in range(3, 11))
"""Deltas of the privacy curve, in addition to the policy's delta."""


def guarantee_of(
    plan: MechanismPlan, delta: float, accountant: AccountantName = "auto"
) -> PrivacyGuarantee:
    """Returns the guarantee of a run of the plan; raises as `accounting.price`."""
    event = canonical_json(event_to_json(plan.event()))
    return _priced(event, plan.relation, delta, accountant, rounds=plan.rounds, unit=plan.unit)


def figures(plan: MechanismPlan, delta: float) -> JsonObject:
    """Returns epsilon under other accountants and relations; null if not available.

    Returns:
      `epsilon_conservative_2c`, `epsilon_rdp`, `zcdp_rho`, and `comparisons`: the same noise under
      another sampler, as name, relation and epsilon. The first and the last are at most 0.1 % too
      large.
    """
    if not plan.private:
        names = ("epsilon_conservative_2c", "epsilon_rdp", "zcdp_rho")
        return {**dict.fromkeys(names), "comparisons": []}
    doubled, added = plan.conservative_event(), NeighboringRelation.ADD_OR_REMOVE_ONE
    if (doubled, added) == (plan.event(), plan.relation):
        conservative = guarantee_of(plan, delta).epsilon
    else:  # the fine grid would take longer than all other figures
        conservative = math.inf if doubled is None else upper_bound(doubled, added, delta)
    return {
        "epsilon_conservative_2c": finite(conservative),
        "epsilon_rdp": epsilon_rdp(plan, delta),
        "zcdp_rho": plan.zcdp_rho,
        "comparisons": [
            {
                "name": other.name,
                "relation": other.relation.name,
                "epsilon": finite(upper_bound(other.event, other.relation, delta)),
            }
            for other in plan.comparisons()
        ],
    }


def epsilon_rdp(plan: MechanismPlan, delta: float) -> float | None:
    """Returns epsilon by RDP if it is valid for the event, else None."""
    if not accounting.supports(plan.event(), plan.relation, "rdp"):
        return None
    return finite(guarantee_of(plan, delta, "rdp").epsilon)


def privacy_curve(plan: MechanismPlan, delta: float) -> list[list[float]]:
    """Returns (delta, epsilon) pairs by falling delta; omits infinite ones, empty without noise."""
    if not plan.private:
        return []
    return _curve(canonical_json(event_to_json(plan.event())), plan.relation, delta)


def plan_attack_rates(plan: MechanismPlan) -> list[tuple[float, float]]:
    """Returns (false positive rate, highest true positive rate of any attack) for one run."""
    return list(_attack_rates(canonical_json(event_to_json(plan.event())), plan.relation))


def finite(value: float) -> float | None:
    """Returns the number, or null for JSON if it is infinite."""
    return value if math.isfinite(value) else None


@functools.lru_cache(maxsize=256)
def _priced(
    event: bytes,
    relation: NeighboringRelation,
    delta: float,
    accountant: AccountantName,
    *,
    rounds: int | None = None,
    unit: Unit = "user",
) -> PrivacyGuarantee:
    return accounting.price(
        event_from_json(json.loads(event)), relation, delta, accountant, rounds=rounds, unit=unit
    )


@functools.lru_cache(maxsize=64)
def _attack_rates(event: bytes, relation: NeighboringRelation) -> list[tuple[float, float]]:
    return attack_rates(event_from_json(json.loads(event)), relation)


@functools.lru_cache(maxsize=64)
def _curve(event: bytes, relation: NeighboringRelation, delta: float) -> list[list[float]]:
    deltas = sorted({*CURVE_DELTAS, delta}, reverse=True)
    points = accounting.curve(event_from_json(json.loads(event)), relation, deltas)
    return [[at, epsilon] for at, epsilon in points if math.isfinite(epsilon)]
