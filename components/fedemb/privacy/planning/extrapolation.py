"""Curves of projected epsilon against population and against compute.

Each mechanism has two curves. Against population: the same plan, with unchanged noise and clients
per round, on more users. Against compute: noise and clients per round grow together at one
population, so that the noise on the mean stays constant. Both use `MechanismPlan.scaled`. Every
point is a projection, not a measured run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fedemb.errors import ConfigError, UnsupportedAccounting
from fedemb.privacy.accounting.accounting import upper_bound
from fedemb.privacy.mechanisms.mechanism import Cohort, MechanismPlan
from fedemb.privacy.mechanisms.registry import MECHANISMS
from fedemb.privacy.planning.prices import guarantee_of

GROWTH = (1, 3, 10, 30, 100, 300)
"""Population factors, relative to the plan."""
COMPUTE = (1, 2, 4, 8, 16)
"""Factors of clients per round, relative to the plan."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """One projected guarantee."""

    mechanism: str
    population: int
    clients_per_round: int
    noise_multiplier: float
    delta: float
    epsilon: float


def compared(plan: MechanismPlan, cohort: Cohort) -> list[MechanismPlan]:
    """Returns the plan and the comparable mechanisms with the same parameters and equal utility.

    Args:
      plan: current plan; the first of its own kind.
      cohort: parameters of the plan.
    """
    others = [
        plan if type(plan) is mechanism else mechanism.at(cohort)
        for mechanism in MECHANISMS.values()
        if mechanism.compared or type(plan) is mechanism
    ]
    return [other.at_equal_utility(cohort.noise_multiplier) for other in others]


def points(
    plans: Iterable[MechanismPlan],
    population: int,
    scales: Sequence[tuple[float, float]],
    exact: MechanismPlan | None = None,
) -> list[Point]:
    """Projects plans to more users and more compute, delta = users**-1.1; skips impossible ones.

    Args:
      plans: plans for this population.
      population: users of the plans.
      scales: (population, compute) factors, see `MechanismPlan.scaled`.
      exact: current plan, priced exactly where it is unscaled, so that the value equals the
          guarantee; other points are upper bounds, at most 0.1 % larger.
    """
    out: list[Point] = []
    for plan in plans:
        for users, compute in scales:
            at = round(population * users)
            delta = float(at**-1.1)
            try:
                scaled = plan.scaled(users, compute)
                if scaled.normalizer > scaled.virtual_clients:
                    continue
                if scaled == exact:
                    epsilon = guarantee_of(scaled, delta).epsilon
                else:
                    epsilon = upper_bound(scaled.event(), scaled.relation, delta)
            except (ConfigError, UnsupportedAccounting):
                continue
            if math.isfinite(epsilon):
                out.append(
                    Point(
                        mechanism=plan.kind,
                        population=at,
                        clients_per_round=round(scaled.normalizer),
                        noise_multiplier=scaled.noise_multiplier,
                        delta=delta,
                        epsilon=epsilon,
                    )
                )
    return out
