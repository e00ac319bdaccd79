"""How many users and how much compute a guarantee takes: curves of projected epsilon.

Two questions, two curves per mechanism. Against population: the plan as it is, noise and clients
per round unchanged, on more users. Against compute: noise and clients per round grown together, so
that the noise on the mean stays, at one population (the paper's extrapolation, dp.md 8). Every
point is a projection; nothing here was run.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from fedemb.errors import ConfigError, UnsupportedAccounting
from fedemb.privacy.accounting.accounting import price, upper_bound
from fedemb.privacy.mechanisms import blt, tree
from fedemb.privacy.mechanisms.mechanism import Kind, MechanismPlan

SETTINGS: tuple[Kind, ...] = (
    "group_poisson_gaussian",
    "user_poisson",
    "fixed_size",
    "tree_aggregation",
    "blt",
)
"""Mechanisms that are compared; the last one has to be optimised first."""
GROWTH = (1, 3, 10, 30, 100, 300)
"""Populations, times that of the plan."""
BltParameters = tuple[tuple[float, ...], tuple[float, ...]]
"""Decays and scales."""
BUFFERS = 2
"""Noise buffers of `blt`."""
COMPUTE = (1, 2, 4, 8, 16)
"""Clients per round, times those of the plan."""


@dataclass(frozen=True, kw_only=True)
class Cohort:
    """The public numbers that all compared mechanisms share."""

    population: int
    users_per_client: int
    clients_per_round: int
    noise_multiplier: float
    rounds: int

    def scaled(self, *, population: float = 1, compute: float = 1) -> Cohort:
        """More users at the same compute, or more compute at the same noise on the mean."""
        return dataclasses.replace(
            self,
            population=round(self.population * population),
            clients_per_round=round(self.clients_per_round * compute),
            noise_multiplier=self.noise_multiplier * compute,
        )


@dataclass(frozen=True, kw_only=True)
class Point:
    """One projected guarantee."""

    mechanism: Kind
    population: int
    clients_per_round: int
    noise_multiplier: float
    delta: float
    epsilon: float


def plan_at(
    kind: Kind,
    cohort: Cohort,
    blt_parameters: BltParameters | None = None,
) -> MechanismPlan:
    """Returns a mechanism's plan for a cohort; participation as even as the schedule allows.

    Args:
      kind: a private mechanism.
      cohort: the public numbers.
      blt_parameters: decays and scales for `blt`, optimised elsewhere; valid at any cohort, if not
        the best there.

    Raises:
      ConfigError: the cohort asks for more clients than there are.
    """
    groups = max(1, round(cohort.population / cohort.users_per_client))
    clients = cohort.clients_per_round
    if clients > groups:
        raise ConfigError(
            f"{clients} clients per round exceed the {groups} virtual clients of "
            f"{cohort.population} users; lower clients_per_round or users_per_client"
        )
    plan = MechanismPlan(
        kind="group_poisson_gaussian",
        rounds=cohort.rounds,
        l2_norm_clip=1.0,
        noise_multiplier=cohort.noise_multiplier,
        virtual_clients=groups,
        groupings=1,
        sampling_probability=clients / groups,
    )
    if kind == "group_poisson_gaussian":
        return plan
    share = min(1.0, clients * cohort.users_per_client / cohort.population)
    if kind in ("user_poisson", "fixed_size"):
        return dataclasses.replace(
            plan,
            kind=kind,
            clients_per_round=clients,
            sampling_probability=share,
            users_per_client=cohort.users_per_client if kind == "fixed_size" else None,
            users_lower_bound=cohort.population if kind == "fixed_size" else None,
        )
    separation, most = cyclic_participation(groups, clients, cohort.rounds)
    return correlated_plan(
        plan,
        kind,
        clients=clients,
        separation=separation,
        most=most,
        blt_parameters=blt_parameters,
    )


def cyclic_participation(virtual_clients: int, clients: int, rounds: int) -> tuple[int, int]:
    """Separation and number of participations if virtual clients take turns."""
    separation = max(1, virtual_clients // clients)
    return separation, math.ceil(rounds * clients / virtual_clients)


def correlated_plan(
    base: MechanismPlan,
    kind: Kind,
    *,
    clients: int,
    separation: int,
    most: int,
    blt_parameters: BltParameters | None = None,
    restart_every: int = 0,
) -> MechanismPlan:
    """A tree or BLT plan with the numbers of `base`."""
    common = {
        "kind": kind,
        "sampling_probability": None,
        "clients_per_round": clients,
        "min_separation": separation,
        "max_participations": most,
    }
    if kind == "tree_aggregation":
        sensitivity = tree.sensitivity(base.rounds, separation, most, restart_every)
        return dataclasses.replace(
            base, **common, restart_every=restart_every, matrix_sensitivity=sensitivity
        )
    decay, scale = blt_parameters or blt.optimise(base.rounds, separation, most, BUFFERS)
    column = blt.coefficients(decay, scale, base.rounds)
    return dataclasses.replace(
        base,
        **common,
        blt_decay=decay,
        blt_scale=scale,
        matrix_sensitivity=blt.sensitivity(column, separation, most),
    )


def at_equal_utility(plan: MechanismPlan, independent_noise: float) -> MechanismPlan:
    """Sets a correlated plan's noise so that running sums of updates are as noisy as without it.

    What a server step sees over a run is the sum of all rounds so far; its root-mean-square noise,
    averaged over rounds, is made equal to that of independent noise (dp.md 1.2). Plans with
    independent noise just get it.
    """
    factor = 1.0
    if plan.tracks_participation:
        factor = math.sqrt((plan.rounds + 1) / 2 / prefix_variance(plan))
    return dataclasses.replace(plan, noise_multiplier=independent_noise * factor)


def prefix_variance(plan: MechanismPlan) -> float:
    """Mean over rounds of the variance of the noise in the running sum, per unit of noise."""
    if plan.kind == "blt":
        assert plan.blt_decay is not None
        assert plan.blt_scale is not None
        column = blt.inverse_coefficients(plan.blt_decay, plan.blt_scale, plan.rounds)
        # Prefix sums of C^-1 Z have the coefficients' running sums as weights.
        return float(np.cumsum(np.cumsum(column) ** 2).mean())
    leaves = plan.restart_every or plan.rounds
    nodes = [
        (round_ // leaves) * leaves.bit_count() + (round_ % leaves + 1).bit_count()
        for round_ in range(plan.rounds)
    ]
    return float(np.mean(nodes))


def points(
    kinds: Iterable[Kind],
    cohorts: Sequence[Cohort],
    blt_parameters: BltParameters | None,
    planned: Cohort | None = None,
) -> list[Point]:
    """Prices each mechanism at each cohort, delta = population**-1.1; impossible ones left out.

    Args:
      kinds: mechanisms to compare.
      cohorts: where to price them.
      blt_parameters: decays and scales for `blt`, see `plan_at`.
      planned: the cohort of the plan in hand, priced exactly, so that the figure repeats the
        guarantee; elsewhere an upper bound that is at most 0.1 % larger is quick enough.
    """
    out: list[Point] = []
    for kind in kinds:
        for cohort in cohorts:
            delta = float(cohort.population**-1.1)
            try:
                plan = at_equal_utility(
                    plan_at(kind, cohort, blt_parameters), cohort.noise_multiplier
                )
                event, relation = plan.event(), plan.relation
                if cohort == planned and not plan.tracks_participation:
                    epsilon = price(event, relation, delta).epsilon
                else:
                    epsilon = upper_bound(event, relation, delta)
            except (ConfigError, UnsupportedAccounting):
                continue
            if math.isfinite(epsilon):
                out.append(
                    Point(
                        mechanism=kind,
                        population=cohort.population,
                        clients_per_round=cohort.clients_per_round,
                        noise_multiplier=plan.noise_multiplier,
                        delta=delta,
                        epsilon=epsilon,
                    )
                )
    return out
