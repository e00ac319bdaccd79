"""Settings of equal privacy loss: batch, rounds and the least noise for a target epsilon.

Utility depends on the noise on the mean, noise / batch; its cost is epochs. The planner shows this
trade-off (De et al., arXiv 2204.13650).
"""

# scipy ships no types.
# pyright: reportMissingTypeStubs=false, reportUnknownVariableType=false

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import product
from typing import TypedDict, cast

from scipy.optimize import brentq

from fedemb.errors import ConfigError
from fedemb.privacy.accounting.accounting import upper_bound
from fedemb.privacy.mechanisms.mechanism import MechanismPlan

BATCHES = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Batch factors, relative to the plan; the full batch is added."""
ROUNDS = (0.25, 0.5, 1.0, 2.0)
"""Round factors, relative to the plan."""
NOISES = (0.5, 0.71, 1.0, 1.41, 2.0)
"""Factors of the noise on the mean, relative to the plan."""
_LEAST, _MOST = 2.0**-4, 2.0**14
_PRECISION = 1e-3


@dataclass(frozen=True, kw_only=True)
class FrontierPoint:
    """One setting that meets the target."""

    batch: int
    """Expected number of contributions per round."""
    rounds: int
    noise_multiplier: float
    noise_per_batch: float
    """Standard deviation of the noise on the mean / clip."""
    epochs: float
    """Expected number of passes over the data."""
    full_batch: bool


@dataclass(frozen=True, kw_only=True)
class PricePoint:
    """The privacy loss of one setting."""

    batch: int
    """Expected number of contributions per round."""
    rounds: int
    noise_per_batch: float
    """Standard deviation of the noise on the mean / clip."""
    epsilon: float
    """Upper bound on epsilon, at most 0.1 % above the exact value."""
    full_batch: bool


def frontier(
    plan: MechanismPlan,
    delta: float,
    target_epsilon: float,
    batches: Sequence[float] = BATCHES,
    rounds: Sequence[float] = ROUNDS,
) -> list[FrontierPoint]:
    """Finds the least noise for each batch and number of rounds; skips those that miss the target.

    Noise is found with an upper bound of epsilon that is at most 0.1 % above the exact price.

    Args:
      plan: plan in the middle of the grid.
      delta: total failure probability.
      target_epsilon: epsilon of every point.
      batches: batch factors, relative to the plan.
      rounds: round factors, relative to the plan.

    Raises:
      ConfigError: the mechanism does not sample, so the batch cannot be chosen.
    """
    points: list[FrontierPoint] = []
    for batch, full in _batches(plan, batches):
        for factor in rounds:
            candidate = batch.replaced(rounds=max(1, round(plan.rounds * factor)))
            noise = least_noise(candidate, delta, target_epsilon)
            if noise is None:
                continue
            points.append(
                FrontierPoint(
                    batch=round(candidate.normalizer),
                    rounds=candidate.rounds,
                    noise_multiplier=noise,
                    noise_per_batch=noise / candidate.normalizer,
                    epochs=candidate.rounds * (candidate.chance or 1.0),
                    full_batch=full,
                )
            )
    return points


def prices_around(
    plan: MechanismPlan,
    delta: float,
    batches: Sequence[float] = BATCHES,
    rounds: Sequence[float] = (1.0,),
    noises: Sequence[float] = (1.0,),
) -> list[PricePoint]:
    """Prices each batch at other rounds and other noise on the mean; skips infinite epsilons.

    Args:
      plan: plan in the middle of the grid.
      delta: total failure probability.
      batches: batch factors at the plan's noise on the mean; the full batch is added.
      rounds: round factors, relative to the plan.
      noises: factors of the noise on the mean, relative to the plan.

    Raises:
      ConfigError: the mechanism does not sample, so the batch cannot be chosen.
    """
    points: list[PricePoint] = []
    for (batch, full), longer, noisier in product(_batches(plan, batches), rounds, noises):
        candidate = batch.replaced(
            rounds=max(1, round(plan.rounds * longer)),
            noise_multiplier=batch.noise_multiplier * noisier,
        )
        epsilon = upper_bound(candidate.event(), candidate.relation, delta)
        if math.isfinite(epsilon):
            points.append(
                PricePoint(
                    batch=round(candidate.normalizer),
                    rounds=candidate.rounds,
                    noise_per_batch=candidate.noise_multiplier / candidate.normalizer,
                    epsilon=epsilon,
                    full_batch=full,
                )
            )
    return points


def _batches(plan: MechanismPlan, batches: Sequence[float]) -> list[tuple[MechanismPlan, bool]]:
    """Returns the plan at each batch below all units, then at all units (flagged)."""
    if plan.chance is None:
        raise ConfigError(
            f"A frontier varies the sampling probability, and {plan.kind} does not have one. Pass "
            "--target-epsilon without a frontier, or another --mechanism."
        )
    shares = sorted(share for share in batches if plan.chance * share < 1)
    full = plan.scaled(compute=1 / plan.chance).replaced(sampling_probability=1.0)
    return [*((plan.scaled(compute=share), False) for share in shares), (full, True)]


def least_noise(plan: MechanismPlan, delta: float, target_epsilon: float) -> float | None:
    """Returns the least noise multiplier that meets the target, to 0.1 %; None if none does."""

    def excess(log_noise: float) -> float:
        candidate = plan.replaced(noise_multiplier=math.exp(log_noise))
        epsilon = upper_bound(candidate.event(), candidate.relation, delta)
        return math.log(min(max(epsilon, 1e-300), 1e300) / target_epsilon)

    low = high = 0.0
    while excess(high) > 0:
        low, high = high, high + math.log(2)
        if high > math.log(_MOST):
            return None
    while low == high:
        low -= math.log(2)
        if low < math.log(_LEAST):
            return math.exp(low)
        if excess(low) <= 0:
            high = low
    root = cast("float", brentq(excess, low, high, xtol=_PRECISION / 2))
    return math.exp(root + _PRECISION / 2)


class CheaperRun(TypedDict):
    """Settings and noise of a cheaper run, see `simulation_at`."""

    share: str
    settings: list[str]
    """Settings to override, `section.field=value`."""
    noise_per_batch: float
    """Noise multiplier / units per round."""
    sentence: str


def simulation_at(plan: MechanismPlan, share: str) -> CheaperRun:
    """Returns a cheaper run with the same behavior: batch and noise scaled by the same share.

    Total amount of noise, TAN (Sander, Stock, Sablayrolles, arXiv 2210.03403): the noise on the
    mean is unchanged, so results hold for the whole run. The cheaper run protects far less, so it
    is for public data only.

    Args:
      plan: the whole run.
      share: share as a fraction, such as `1/16`.

    Raises:
      ConfigError: the share is not a number between 0 and 1 or gives an empty batch, or every round
          uses all units.
    """
    try:
        factor = float(Fraction(share))
    except (ValueError, ZeroDivisionError):
        factor = math.nan
    if not 0 < factor < 1 or plan.normalizer * factor < 1:
        raise ConfigError(
            f"--simulate-at {share} must be between 0 and 1 and leave at least one unit per round; "
            "pass for example 1/16"
        )
    small = plan.scaled(compute=factor)
    if small.normalizer == plan.normalizer:
        raise ConfigError(
            f"--simulate-at {share} does not apply to {plan.kind}, whose rounds use all units; "
            "omit it, or use a mechanism that samples"
        )
    fields = plan.section.model_fields
    ours, theirs = plan.to_json(), small.to_json()
    changed = [name for name in fields if ours[name] != theirs[name]]
    return {
        "share": share,
        "settings": [
            "purpose=simulation",
            *(f"mechanism.{name}={json.dumps(theirs[name])}" for name in changed),
        ],
        "noise_per_batch": small.noise_multiplier / small.normalizer,
        "sentence": "a simulation for public data: same noise on the mean, hardly any guarantee",
    }
