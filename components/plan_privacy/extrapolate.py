"""How many users and how much compute it takes: `fedemb plan --extrapolate`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from fedemb.config import RunConfig
from fedemb.documents.artifacts import write_bytes
from fedemb.errors import ConfigError
from fedemb.privacy.mechanisms.mechanism import MechanismPlan
from fedemb.privacy.planning.extrapolation import COMPUTE, GROWTH, SETTINGS, Cohort, points
from fedemb.steps.plan_privacy.figure import extrapolation_svg


def extrapolate(
    config: RunConfig, mechanism: MechanismPlan, figure: Path, users_per_client: int | None = None
) -> dict[str, Any]:
    """Prices every mechanism at more users and at more compute, and draws it.

    Args:
      config: where the plan comes from.
      mechanism: the plan; its numbers are the first point of each curve.
      figure: SVG to write.
      users_per_client: users per virtual client; by default what the configuration implies.

    Returns:
      The figure's path, the population simulated at, and the points of both panels.

    Raises:
      ConfigError: the plan has no noise to extrapolate.
    """
    if not mechanism.private:
        raise ConfigError("not_private has no epsilon to extrapolate; plan another mechanism")
    population = config.policy.users_lower_bound
    size = users_per_client or max(1, round(population / mechanism.virtual_clients))
    cohort = Cohort(
        population=population,
        users_per_client=size,
        clients_per_round=max(1, round(mechanism.normaliser)),
        noise_multiplier=mechanism.noise_multiplier,
        rounds=mechanism.rounds,
    )
    parameters = None
    if mechanism.blt_decay is not None and mechanism.blt_scale is not None:
        parameters = (mechanism.blt_decay, mechanism.blt_scale)
    # Optimising BLT noise takes a minute, so it is compared only where it is planned.
    kinds = SETTINGS if parameters is not None else SETTINGS[:-1]
    at = max(config.policy.certify_at, default=population)
    larger = cohort.scaled(population=at / population)
    more_users = points(
        kinds, [cohort.scaled(population=x) for x in GROWTH], parameters, planned=cohort
    )
    more_compute = points(
        kinds, [larger.scaled(compute=x) for x in COMPUTE], parameters, planned=cohort
    )
    write_bytes(figure, extrapolation_svg(more_users, more_compute).encode())
    return {
        "figure": str(figure),
        "simulated_at": population,
        "population": [asdict(point) for point in more_users],
        "compute": [asdict(point) for point in more_compute],
    }
