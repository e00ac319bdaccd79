"""How many users and how much compute a guarantee takes: curves of projected epsilon.

Two questions, two curves per mechanism. Against population: the plan as it is, noise and clients
per round unchanged, on more users. Against compute: noise and clients per round grown together, so
that the noise on the mean stays, at one population. Both are `MechanismPlan.scaled`. Every point is
a projection; nothing here was run.
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
"""Populations, times that of the plan."""
COMPUTE = (1, 2, 4, 8, 16)
"""Clients per round, times those of the plan."""


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
    """The plan and, at its numbers, the mechanisms it is compared with, equally useful all of them.

    Args:
      plan: the plan in hand; the first of its own kind.
      cohort: its numbers.
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
    """Prices plans at more users and more compute, delta = users**-1.1; impossible ones left out.

    Args:
      plans: made for this population.
      population: users of the plans.
      scales: (population, compute) factors, see `MechanismPlan.scaled`.
      exact: the plan in hand, priced exactly where it is met unscaled, so that the figure repeats
        the guarantee; elsewhere an upper bound that is at most 0.1 % larger is quick enough.
    """
    out: list[Point] = []
    for plan in plans:
        for users, compute in scales:
            at = round(population * users)
            delta = float(at**-1.1)
            try:
                scaled = plan.scaled(users, compute)
                if scaled.normaliser > scaled.virtual_clients:
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
                        clients_per_round=round(scaled.normaliser),
                        noise_multiplier=scaled.noise_multiplier,
                        delta=delta,
                        epsilon=epsilon,
                    )
                )
    return out
