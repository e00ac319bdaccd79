"""What a mechanism plan must satisfy, wherever it comes from: configuration or file."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, cast

from fedemb.errors import ConfigError, PlanMismatch
from fedemb.privacy.mechanisms import blt
from fedemb.privacy.mechanisms.noise import GRID_BITS

if TYPE_CHECKING:
    from fedemb.privacy.mechanisms.mechanism import MechanismPlan

MAX_SUM_BITS = 61
"""Sums of clipped integers, and noise, stay below 2^61 in a signed 64-bit word."""
NOISE_REACH = 14.0
"""Standard deviations no normal of `noise.gaussian` passes."""
LEAST_NOISE = 1e-6
"""Of the two noise multipliers of an adaptive clip, whose squares are inverted to join them."""
CORRELATED_ROOM_BITS = 6
"""Correlated noise adds up draws of many rounds; this much more room is left for it."""


def _positive(name: str, value: float | None, high: float = math.inf, low: float = 0.0) -> None:
    # Written so that NaN and None fail.
    if value is None or not (low < value <= high and math.isfinite(value)):
        raise ConfigError(
            f"mechanism plan: {name}={value} must be a number above {low:g} and of at most "
            f"{high:g}; correct the configuration and plan anew"
        )


def check_plan(plan: MechanismPlan) -> None:
    """Refuses a plan that cannot run with the guarantee it claims.

    Raises:
      ConfigError: a number is out of bounds, missing, or contradicts another.
      PlanMismatch: the matrix sensitivity is not the one we compute.
    """
    for name in ("rounds", "l2_norm_clip", "virtual_clients", "groupings"):
        _positive(name, getattr(plan, name))
    if plan.private:
        _positive("noise_multiplier", plan.noise_multiplier)
        if plan.grid_bits < GRID_BITS:
            raise ConfigError(
                f"grid_bits={plan.grid_bits} is below {GRID_BITS}, where floating-point noise "
                "would show between the grid points"
            )
    elif plan.noise_multiplier != 0:
        raise ConfigError("not_private has no noise; name a mechanism that has")
    if plan.tracks_participation:
        _check_participation(plan)
    else:
        _positive("sampling_probability", plan.sampling_probability, 1.0)
    if plan.kind not in ("group_poisson_gaussian", "not_private"):
        _positive("clients_per_round", plan.clients_per_round)
    count_noise = plan.adaptive_clip.count_noise_multiplier if plan.adaptive_clip else 0.0
    if plan.adaptive_clip is not None:
        if plan.tracks_participation or not plan.private:
            raise ConfigError(f"{plan.kind} needs a constant clip; drop adaptive_clip")
        _positive("count_noise_multiplier", count_noise, low=LEAST_NOISE)
        _positive("noise_multiplier", plan.noise_multiplier, low=LEAST_NOISE)
    contributions = max(plan.virtual_clients, plan.clients_per_round or 0)
    # The noise of the count stands on the same grid as that of the sum.
    most_noise = max(plan.noise_multiplier, count_noise)
    noise_bits = plan.grid_bits + math.log2(max(most_noise, 1) * NOISE_REACH)
    if plan.tracks_participation:
        noise_bits += CORRELATED_ROOM_BITS
    sum_bits = plan.grid_bits + math.log2(contributions)
    if not max(noise_bits, sum_bits) < MAX_SUM_BITS:
        raise ConfigError(
            f"sums of {contributions} virtual clients with a noise multiplier of "
            f"{most_noise:g} (the larger of noise_multiplier and adaptive_clip."
            "count_noise_multiplier) could overflow 64-bit integers; lower either"
        )


def _check_participation(plan: MechanismPlan) -> None:
    for name in ("clients_per_round", "min_separation", "max_participations"):
        _positive(name, getattr(plan, name))
    clients = cast("int", plan.clients_per_round)
    separation, most = cast("int", plan.min_separation), cast("int", plan.max_participations)
    if plan.groupings != 1:
        raise ConfigError(
            f"{plan.kind} bounds how often a virtual client takes part, so groupings must be 1, "
            f"got {plan.groupings}"
        )
    if clients * separation > plan.virtual_clients:
        raise ConfigError(
            f"{clients} clients per round and min_separation={separation} need at least "
            f"{clients * separation} virtual clients, got {plan.virtual_clients}; lower either"
        )
    if clients * plan.rounds > most * plan.virtual_clients:
        raise ConfigError(
            f"{plan.rounds} rounds of {clients} clients need "
            f"{math.ceil(clients * plan.rounds / plan.virtual_clients)} participations of some "
            f"virtual client, got max_participations={most}; raise it or lower rounds"
        )
    if plan.kind == "blt":
        blt.check(plan.blt_decay, plan.blt_scale)
    ours = plan.sensitivity_over(plan.rounds)
    if plan.matrix_sensitivity is None or not math.isclose(
        ours, plan.matrix_sensitivity, rel_tol=1e-9
    ):
        raise PlanMismatch(
            f"matrix_sensitivity={plan.matrix_sensitivity} of the plan differs from the recomputed "
            f"{ours:.12g}; plan the run anew"
        )
