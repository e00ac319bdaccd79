"""Finds the noise for a target epsilon."""

from __future__ import annotations

# pyright: reportMissingTypeStubs=false, reportUnknownVariableType=false
import math
from collections.abc import Callable
from typing import cast

from dp_accounting import dp_event as dpe
from dp_accounting.privacy_accountant import NeighboringRelation
from scipy.optimize import brentq

from fedemb.errors import ConfigError
from fedemb.privacy.accounting.accounting import price, supports
from fedemb.privacy.accounting.events import repeated
from fedemb.privacy.accounting.loss_grid import quick_epsilon
from fedemb.privacy.accounting.sampler_share import largest_epsilon
from fedemb.privacy.mechanisms.mechanism import MechanismPlan
from fedemb.privacy.mechanisms.section import MOST_NOISE

_EpsilonOf = Callable[[dpe.DpEvent, NeighboringRelation, float, int], float]
RELATIVE_TOLERANCE = 1e-3
"""Maximum relative excess of the returned noise over the least sufficient noise."""
_LEAST = 2.0**-4
_MISSED = 0.01
"""Relative distance below the target at which the target counts as missed."""
_NEAR_LIMIT = 3.0
"""Maximum distance of a mechanism's own limit below `largest_epsilon`; larger than observed."""


def with_target_epsilon(
    plan: MechanismPlan, target_epsilon: float, delta: float, *, runs: int = 1
) -> MechanismPlan:
    """Returns the plan with the least noise multiplier that keeps epsilon at or below the target.

    Root finding on the logarithm: epsilon falls as noise grows.

    Args:
      plan: a private mechanism; its own noise multiplier is ignored.
      target_epsilon: bound on epsilon of all runs together.
      delta: total failure probability of all runs together.
      runs: number of runs of this plan on the same users, at least 1.

    Raises:
      ConfigError: the target is not a positive number, the mechanism has no noise, or no noise in
          range reaches the target at this delta.
    """
    if not (0 < target_epsilon < math.inf):
        raise ConfigError(
            f"target_epsilon={target_epsilon} must be a positive number; use a value from 1 to 8"
        )
    if not plan.private:
        raise ConfigError(f"{plan.kind} has no noise to calibrate; use another mechanism")
    if target_epsilon >= (limit := largest_epsilon(delta, runs)):
        raise _beyond_the_sampler(target_epsilon, delta, limit)

    def spent_by(candidate: MechanismPlan, epsilon_of: _EpsilonOf) -> float:
        event = repeated(candidate.event(), runs) if runs > 1 else candidate.event()
        return epsilon_of(event, candidate.relation, delta, runs)

    def excess(log_noise: float, epsilon_of: _EpsilonOf = _epsilon) -> float:
        candidate = plan.replaced(noise_multiplier=min(math.exp(log_noise), MOST_NOISE))
        spent = spent_by(candidate, epsilon_of)
        return math.log(min(max(spent, 1e-300), 1e300) / target_epsilon)

    # Both are quick. Except for targets below PLD's grid of losses, they return slightly too much.
    quick = _renyi_epsilon if supports(plan.event(), plan.relation, "rdp") else _quick_epsilon
    high = _bracket(lambda log_noise: excess(log_noise, quick), target_epsilon, delta)
    while excess(math.log(enough := _printed(high))) > 0:
        high = _doubled(high, target_epsilon, delta)
    steep = (excess(high, quick) - excess(high - 0.02, quick)) / 0.02
    found = plan.replaced(noise_multiplier=_least(excess, enough, steep))
    # Near the limit, epsilon jumps from a value below the target to infinity.
    reached = spent_by(found, _epsilon)
    if reached < (1 - _MISSED) * target_epsilon and target_epsilon > limit - _NEAR_LIMIT:
        raise _beyond_the_sampler(target_epsilon, delta, reached)
    return found


def _beyond_the_sampler(target_epsilon: float, delta: float, limit: float) -> ConfigError:
    return ConfigError(
        f"target_epsilon={target_epsilon:g} cannot be reached at delta {delta:g}: the noise "
        f"sampler's share of delta grows with e^epsilon and allows at most {limit:.4g}. Set "
        f"target_epsilon to {math.floor(limit - 0.8)} or less, or raise delta"
    )


def _least(excess: Callable[[float], float], enough: float, steep: float) -> float:
    """Returns the least sufficient noise, to `RELATIVE_TOLERANCE`, with few price evaluations.

    Uses secant steps, and bisection if a step leaves the bracket. The noise is rounded before it is
    priced, so that the price belongs to the printed number.

    Args:
      excess: log of epsilon / target at a logarithm of noise; falls almost linearly.
      enough: sufficient noise.
      steep: approximate slope there; after the second evaluation it is computed.
    """
    left, short, sure = excess(math.log(enough)), _LEAST, False
    while True:
        root = math.log(enough) - left / min(max(steep, -4.0), -0.5)
        # Far below the target, epsilon is 0 and the step would underflow.
        noise = _printed(max(root + RELATIVE_TOLERANCE / 4, math.log(short)))
        if not short < noise < enough:
            noise = _printed((math.log(short) + math.log(enough)) / 2)
        least = max(root if sure else -math.inf, math.log(short))
        if noise >= enough or math.log(enough) - least < RELATIVE_TOLERANCE:
            return enough
        found, sure = excess(math.log(noise)), True
        steep = (found - left) / (math.log(noise) - math.log(enough))
        if found > 0:
            short = noise
        else:
            enough, left = noise, found


def _printed(log_noise: float) -> float:
    """Returns the noise, rounded up to four digits."""
    noise = min(math.exp(log_noise), MOST_NOISE)
    digits = 4 - math.ceil(math.log10(noise))
    return min(math.ceil(noise * 10**digits) / 10**digits, MOST_NOISE)


def _epsilon(event: dpe.DpEvent, relation: NeighboringRelation, delta: float, runs: int) -> float:
    return price(event, relation, delta, runs=runs).epsilon


def _renyi_epsilon(
    event: dpe.DpEvent, relation: NeighboringRelation, delta: float, runs: int
) -> float:
    return price(event, relation, delta, "rdp", runs=runs).epsilon


def _quick_epsilon(
    event: dpe.DpEvent, relation: NeighboringRelation, delta: float, runs: int
) -> float:
    return quick_epsilon(event, relation, delta)


def _bracket(excess: Callable[[float], float], target_epsilon: float, delta: float) -> float:
    """Returns a log-noise within 0.02 of the root of `excess`, on its far side."""
    low = high = 0.0
    while excess(high) > 0:
        low, high = high, _doubled(high, target_epsilon, delta)
    while low == high:
        low -= math.log(2)
        if low <= math.log(_LEAST):
            return math.log(_LEAST)
        if excess(low) <= 0:
            high = low
    return cast("float", brentq(excess, low, high, xtol=0.01)) + 0.02


def _doubled(log_noise: float, target_epsilon: float, delta: float) -> float:
    most = math.log(MOST_NOISE)
    if log_noise >= most:
        raise ConfigError(
            f"no noise_multiplier up to {MOST_NOISE:g} reaches epsilon {target_epsilon:g} at delta "
            f"{delta:g}; raise delta, lower rounds or the sampling probability"
        )
    return min(log_noise + math.log(2), most)
