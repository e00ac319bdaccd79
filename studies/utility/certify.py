"""Cohort, epsilon and number of examples that a noise on the mean needs at a population.

Utility follows the noise on the mean, sigma / clients per round; epsilon follows sigma and the
sampling rate. So the cohort and sigma grow together until epsilon is low enough (the paper's
extrapolation, arXiv 2211.10844, section 4; docs/how_to/choose_epsilon.md#projections), and
the cost is the number of examples.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

from fedemb.errors import ConfigError, UnsupportedAccounting
from fedemb.privacy.accounting import upper_bound
from fedemb.privacy.group_mechanisms import GroupPoissonGaussian, TreeAggregation
from fedemb.privacy.mechanism import MechanismPlan
from studies.cohort import Cohort, at_equal_utility
from studies.utility.rows import Method, Row

POPULATIONS = (100_000, 1_000_000, 10_000_000)
TARGET = 2.0
"""The epsilon that the smallest cohort is sought for."""
STEP = 2.0
"""Between two cohorts that are tried."""
LEAST_NOISE = 0.35
"""Noise multiplier of the smallest cohort that is tried."""
ENOUGH = 1.1
"""Where a larger cohort lowers epsilon by less than this factor, no larger one is tried."""
MECHANISMS: dict[Method, type[MechanismPlan]] = {
    "fedemb": GroupPoissonGaussian,
    "fedavg": GroupPoissonGaussian,
    "ftrl": TreeAggregation,
}


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """A projection: no run with this cohort has been made.

    Attributes:
      population: users.
      epsilon: at `delta`; add or remove one user, with everything they own.
      delta: population ** -1.1.
      clients_per_round: virtual clients per round, expected.
      noise_multiplier: standard deviation of the noise on the sum / clip.
    """

    population: int
    epsilon: float
    delta: float
    clients_per_round: int
    noise_multiplier: float

    def examples(self, *, users_per_client: int, images_per_user: int, visits: int) -> float:
        """Images trained on in the whole run: the price; `visits` is rounds x local epochs."""
        return float(self.clients_per_round) * users_per_client * images_per_user * visits


def cohorts(noise: float, virtual_clients: int) -> list[int]:
    """Numbers of clients per round that are tried, ascending; all of them at the end."""
    tried, clients = [], max(1.0, LEAST_NOISE / noise)
    while clients < virtual_clients:
        tried.append(math.ceil(clients))
        clients *= STEP
    return [*tried, virtual_clients]


@cache
def certify(
    mechanism: type[MechanismPlan],
    noise: float,
    rounds: int,
    users_per_client: int,
    population: int,
) -> Certificate | None:
    """The cheapest cohort that reaches the target, or the one from which more compute helps little.

    Args:
      mechanism: correlated ones get the noise that leaves running sums equally noisy.
      noise: standard deviation of the noise on the mean / clip.
      rounds: of the run.
      users_per_client: users per virtual client.
      population: users.

    Returns:
      None if no cohort can be priced.
    """
    found: list[Certificate] = []
    for clients in cohorts(noise, population // users_per_client):
        cohort = Cohort(
            population=population,
            users_per_client=users_per_client,
            clients_per_round=clients,
            noise_multiplier=noise * clients,
            rounds=rounds,
        )
        plan = at_equal_utility(cohort.plan(mechanism), cohort.noise_multiplier)
        delta = float(population**-1.1)
        try:
            epsilon = upper_bound(plan.event(), plan.relation, delta)
        except (ConfigError, UnsupportedAccounting):
            continue
        if plan.normalizer > plan.virtual_clients or not math.isfinite(epsilon):
            continue
        found.append(
            Certificate(
                population=population,
                epsilon=epsilon,
                delta=delta,
                clients_per_round=round(plan.normalizer),
                noise_multiplier=plan.noise_multiplier,
            )
        )
        if found[-1].epsilon <= TARGET:
            break
        if len(found) > 1 and found[-2].epsilon < ENOUGH * found[-1].epsilon:
            return found[-2]
    return found[-1] if found else None


def certificates(row: Row, rounds: int, visits: int, images_per_user: int) -> list[dict[str, Any]]:
    """Certificates of a row at all populations, with their price in examples; empty without noise.

    Args:
      row: its method, noise and users per virtual client count.
      rounds: of its run.
      visits: rounds x local epochs.
      images_per_user: of the data.
    """
    if not row.noise or row.method not in MECHANISMS:
        return []
    result = []
    for population in POPULATIONS:
        one = certify(MECHANISMS[row.method], row.noise, rounds, row.users_per_client, population)
        if one is not None:
            price = one.examples(
                users_per_client=row.users_per_client,
                images_per_user=images_per_user,
                visits=visits,
            )
            result.append({**asdict(one), "examples": price})
    return result
