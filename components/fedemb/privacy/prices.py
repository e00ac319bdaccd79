"""All privacy figures of a plan: the guarantee and the comparison figures, cached.

Plan, report and gate use this module, so that each figure is computed in one way. Several gate
rules price the same event, and each event is priced once.
"""

# The numeric libraries are not fully typed; the project's own signatures are checked.
# pyright: reportMissingTypeStubs=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import functools
import math
from collections.abc import Callable

from dp_accounting import dp_event as dpe
from dp_accounting.privacy_accountant import NeighboringRelation

from fedemb.foundation.canonical_json import JsonObject
from fedemb.privacy import accounting
from fedemb.privacy.accounting import AccountantName, epsilon_function, upper_bound
from fedemb.privacy.guarantee import PrivacyGuarantee
from fedemb.privacy.mechanism import MechanismPlan


@functools.lru_cache(maxsize=256)
def guarantee_of(
    plan: MechanismPlan, delta: float, accountant: AccountantName = "auto"
) -> PrivacyGuarantee:
    """Returns the guarantee of a run of the plan; raises as `accounting.price`."""
    event = plan.event()
    return accounting.price(
        event, plan.relation, delta, accountant, rounds=plan.rounds, unit=plan.unit
    )


def figures(plan: MechanismPlan, delta: float) -> JsonObject:
    """Returns epsilon under other accountants and relations; null if not available.

    Returns:
      `epsilon_conservative_2c`, at most 0.1 % too large, `epsilon_rdp` and `zcdp_rho`.
    """
    if not plan.private:
        return dict.fromkeys(("epsilon_conservative_2c", "epsilon_rdp", "zcdp_rho"))
    doubled, added = plan.conservative_event(), NeighboringRelation.ADD_OR_REMOVE_ONE
    if (doubled, added) == (plan.event(), plan.relation):
        conservative = guarantee_of(plan, delta).epsilon
    else:  # the fine grid would take longer than all other figures
        conservative = math.inf if doubled is None else upper_bound(doubled, added, delta)
    return {
        "epsilon_conservative_2c": finite(conservative),
        "epsilon_rdp": epsilon_rdp(plan, delta),
        "zcdp_rho": plan.zcdp_rho,
    }


def epsilon_rdp(plan: MechanismPlan, delta: float) -> float | None:
    """Returns epsilon by RDP if it is valid for the event, else None."""
    if not accounting.supports(plan.event(), plan.relation, "rdp"):
        return None
    return finite(guarantee_of(plan, delta, "rdp").epsilon)


@functools.lru_cache(maxsize=64)
def plan_attack_rates(plan: MechanismPlan) -> list[tuple[float, float]]:
    """Returns (false positive rate, highest true positive rate of any attack) for one run."""
    return attack_rates(plan.event(), plan.relation)


def finite(value: float) -> float | None:
    """Returns the number, or null for JSON if it is infinite."""
    return value if math.isfinite(value) else None


# Computes what an epsilon means: how well any attack can tell whether a unit took part.
#
# An attack decides from the model whether one unit was in the training data. If the mechanism is
# (epsilon, delta)-private, its true positive rate at false positive rate a is at most both
#
# delta + exp(epsilon) a and 1 - exp(-epsilon) (1 - delta - a).
#
# Every point of the privacy curve gives such a pair, and the least bound holds. All points
# together give the exact trade-off curve, if the larger delta of both directions is used. A
# search that misses the best point can therefore only return a rate that is too high.
#
# Source: Kairouz, Oh and Viswanath (arXiv 1311.0776); Dong, Roth and Su (arXiv 1905.02383), prop.
# 6.


FALSE_POSITIVE_RATES = (1e-2, 1e-3, 1e-4)
"""False positive rates that reports show."""
_LEAST_LOG_DELTA = math.log(1e-9)
"""Lower end of the search; a delta below it changes no rate that is shown."""
_GRID = 48
"""Points of the privacy curve on the first grid, evenly spaced in the logarithm of delta."""
_REFINED = 24
"""Steps of golden section around the best point of the grid, for each rate."""
_GOLDEN = (math.sqrt(5) - 1) / 2


def attack_rates(
    event: dpe.DpEvent,
    relation: NeighboringRelation,
    accountant: AccountantName = "auto",
    rates: tuple[float, ...] = FALSE_POSITIVE_RATES,
) -> list[tuple[float, float]]:
    """Returns upper bounds on the true positive rate of every attack.

    The privacy loss distribution is the one that prices the run, and the noise is the noise that is
    drawn, not ideal noise.

    Args:
      event: event on the data of one unit.
      relation: neighbouring relation of the event.
      accountant: accountant of the guarantee.
      rates: false positive rates, between 0 and 1.

    Returns: A pair (false positive rate, highest true positive rate) for each rate.

    Raises:
      UnsupportedAccounting: no accountant, or not the requested one, is valid for the pair.
    """
    epsilon = functools.cache(epsilon_function(event, relation, accountant))
    return [(rate, _highest(epsilon, rate)) for rate in rates]


def _highest(epsilon: Callable[[float], float], rate: float) -> float:
    """Returns the least bound over the privacy curve, for one false positive rate."""

    def bound(log_delta: float) -> float:
        delta = math.exp(log_delta)
        return attack_bound(epsilon(delta), delta, rate)

    step = -_LEAST_LOG_DELTA / _GRID
    points = [_LEAST_LOG_DELTA + step * index for index in range(_GRID)]
    best = min(points, key=bound)
    found = bound(best)
    low, high = max(_LEAST_LOG_DELTA, best - step), min(best + step, -1e-9)
    for _ in range(_REFINED):
        left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
        at_left, at_right = bound(left), bound(right)
        found = min(found, at_left, at_right)
        low, high = (low, right) if at_left <= at_right else (left, high)
    return found


def attack_bound(epsilon: float, delta: float, rate: float) -> float:
    """Returns the highest true positive rate that one (epsilon, delta) allows.

    >>> attack_bound(0.0, 0.0, 0.01), round(attack_bound(1.0, 0.0, 0.01), 4)
    (0.01, 0.0272)
    """
    if epsilon > 700:  # beyond float64
        return 1.0
    low, high = delta + math.exp(epsilon) * rate, 1 - math.exp(-epsilon) * (1 - delta - rate)
    return min(1.0, low, high)


def rounded_up(value: float, digits: int = 3) -> float:
    """Returns the number with a few significant digits, never below the number.

    >>> rounded_up(0.041234), rounded_up(0.05), rounded_up(12.31)
    (0.0413, 0.05, 12.4)
    """
    if value <= 0 or not math.isfinite(value):
        return value
    places = digits - 1 - math.floor(math.log10(value))
    scaled = math.ceil(value * 10.0**places * (1 - 1e-12))
    return float(f"{scaled}e{-places}")
