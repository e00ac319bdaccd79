"""Plans a mechanism, finds the noise for a target epsilon, and projects to other populations."""

# The numeric libraries are not fully typed; the project's own signatures are checked.
# pyright: reportMissingTypeStubs=false, reportUnknownVariableType=false

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import cast

from dp_accounting import dp_event as dpe
from dp_accounting.privacy_accountant import NeighboringRelation
from scipy.optimize import brentq

from fedemb.errors import ConfigError
from fedemb.foundation.canonical_json import JsonObject
from fedemb.privacy.accounting import price, supports
from fedemb.privacy.guarantee import PrivacyGuarantee, largest_epsilon, repeated
from fedemb.privacy.losses import quick_epsilon
from fedemb.privacy.mechanism import MechanismPlan
from fedemb.privacy.prices import finite, guarantee_of
from fedemb.privacy.registry import plan_of
from fedemb.privacy.section import MOST_NOISE, MechanismConfig, PublicNumbers, Unit


def plan(
    mechanism: MechanismConfig,
    *,
    virtual_clients: int,
    groupings: int = 1,
    population: int | None = None,
    unit: Unit = "user",
    max_images_per_user: int | None = None,
) -> MechanismPlan:
    """Plans a mechanism: sampler, clipping norm, noise and privacy loss in one object.

    >>> from fedemb import GroupPoissonGaussianConfig
    >>> mechanism = GroupPoissonGaussianConfig(
    ...     rounds=30, sampling_probability=0.1, noise_multiplier=0.83)
    >>> round(epsilon(plan(mechanism, virtual_clients=900), delta=1e-5), 2)
    7.55

    Args:
      mechanism: configuration of the mechanism.
      virtual_clients: virtual clients per grouping, a public constant.
      groupings: independent groupings.
      population: public lower bound on the number of users, for mechanisms that draw a fixed number
          of users; None assumes one user per virtual client, which is a safe bound.
      unit: privacy unit: a user with all of their data, or one image.
      max_images_per_user: maximum number of images per user that take part. Required by mechanisms
          that sample individual images; a larger number costs more.

    Raises:
      ConfigError: the mechanism cannot run on these virtual clients with the guarantee it claims,
          or it samples images and `max_images_per_user` is not set.
    """
    numbers = PublicNumbers(
        virtual_clients=virtual_clients,
        groupings=groupings,
        users_lower_bound=population or virtual_clients,
        max_images_per_user=max_images_per_user or 1,
        unit=unit,
    )
    planned = plan_of(mechanism, numbers)
    if planned.samples_images and max_images_per_user is None:
        raise ConfigError(
            f"{planned.kind} samples single images of a user, so its price depends on their "
            "number; pass max_images_per_user"
        )
    return planned


def guarantee(planned: MechanismPlan, delta: float) -> PrivacyGuarantee:
    """Returns the guarantee of a whole run of a plan to one unit.

    Args:
      planned: result of `plan`.
      delta: total failure probability; usually population ** -1.1.

    Raises:
      ValueError: delta is not a probability above the sampler's share.
    """
    return guarantee_of(planned, delta)


def epsilon(planned: MechanismPlan, delta: float) -> float:
    """Returns epsilon of `guarantee`; report it with delta, unit and relation."""
    return guarantee(planned, delta).epsilon


# Finds the noise for a target epsilon.


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
    by_rdp = supports(plan.event(), plan.relation, "rdp")

    def quick(event: dpe.DpEvent, relation: NeighboringRelation, delta: float, runs: int) -> float:
        if by_rdp:
            return price(event, relation, delta, "rdp", runs=runs).epsilon
        return quick_epsilon(event, relation, delta)

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


# Projects a plan to another population: the guarantee of such a run.
#
# A simulation at one population and a certified guarantee at another are never mixed
# (docs/how_to/choose_epsilon.md#projections; Xu et al., arXiv 2211.10844, section 4).


@dataclass(frozen=True, kw_only=True)
class Projection:
    """A plan scaled to another population."""

    simulated_at: int
    """Number of users of the plan."""
    population: int
    """Number of users of the projection."""
    virtual_clients: int
    clients_per_round: float
    """Expected virtual clients per round, which determines the compute."""
    noise_multiplier: float
    delta: float
    epsilon: float
    compute_factor: float
    """Clients per round / clients per round of the plan."""

    def to_json(self) -> JsonObject:
        """Returns the projection as a JSON object; an infinite epsilon is null."""
        return {**asdict(self), "epsilon": finite(self.epsilon)}


def project(
    plan: MechanismPlan, simulated_at: int, population: int, delta: float | None = None
) -> Projection:
    """Prices a plan for another population at the same noise on the mean, see `scaled`.

    Args:
      plan: simulated mechanism.
      simulated_at: public population of the simulation.
      population: population of the projection.
      delta: total delta; population**-1.1 by default, and if it would reach 1/population.
    """
    factor = population / simulated_at
    scaled = plan.scaled(population=factor, compute=factor)
    customary = float(population**-1.1)
    safe = customary if delta is None or delta >= 1 / population else delta
    return Projection(
        simulated_at=simulated_at,
        population=population,
        virtual_clients=scaled.virtual_clients,
        clients_per_round=scaled.normalizer,
        noise_multiplier=scaled.noise_multiplier,
        delta=safe,
        epsilon=guarantee_of(scaled, safe).epsilon,
        compute_factor=scaled.normalizer / plan.normalizer,
    )
