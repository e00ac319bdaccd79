"""Epsilon against users and compute: `fedemb extrapolate`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TypeAlias, TypedDict

from fedemb.config import RunConfig
from fedemb.errors import ConfigError
from fedemb.foundation.files import write_bytes
from fedemb.privacy.mechanisms.mechanism import Cohort, MechanismPlan
from fedemb.privacy.planning.extrapolation import COMPUTE, GROWTH, compared, points
from fedemb.steps.plan_privacy.figure import extrapolation_svg

Row: TypeAlias = Mapping[str, float | str]
"""Fields of a point."""


class Extrapolation(TypedDict):
    """Epsilon of more users and more compute, as JSON."""

    figure: str
    """Path of the figure."""
    simulated_at: int
    population: list[Row]
    compute: list[Row]


def extrapolate(
    config: RunConfig, mechanism: MechanismPlan, figure: Path, users_per_client: int | None = None
) -> Extrapolation:
    """Computes every mechanism's epsilon for more users and for more compute, and draws it.

    Raises:
      ConfigError: the plan has no noise.
    """
    if not mechanism.private:
        raise ConfigError(f"{mechanism.kind} has no epsilon to extrapolate. Use another mechanism.")
    population = config.policy.users_lower_bound
    cohort = Cohort(
        population=population,
        users_per_client=users_per_client or max(1, round(population / mechanism.virtual_clients)),
        clients_per_round=max(1, round(mechanism.normalizer)),
        noise_multiplier=mechanism.noise_multiplier,
        rounds=mechanism.rounds,
    )
    plans = compared(mechanism, cohort)
    at = max(config.policy.certify_at, default=population) / population
    more_users = points(plans, population, [(x, 1) for x in GROWTH], exact=mechanism)
    more_compute = points(plans, population, [(at, x) for x in COMPUTE], exact=mechanism)
    write_bytes(figure, extrapolation_svg(more_users, more_compute).encode())
    return {
        "figure": str(figure),
        "simulated_at": population,
        "population": [asdict(point) for point in more_users],
        "compute": [asdict(point) for point in more_compute],
    }
