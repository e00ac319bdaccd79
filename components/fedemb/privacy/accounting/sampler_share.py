"""The cost of drawn noise beyond ideal noise: a share of delta, reserved before accounting."""

from __future__ import annotations

import math
from collections.abc import Callable

from fedemb.errors import ConfigError

SAMPLER_TOTAL_VARIATION = 2.0**-51
"""Distance of one run's noise from true Gaussians, see `noise.TOTAL_VARIATION_PER_NORMAL`."""
_FIRST_SHARE = 1e-6
"""Initial share of delta; almost always more than needed."""


def sampler_delta(epsilon: float, runs: int) -> float:
    """Returns the part of delta that drawn noise needs beyond ideal noise.

    If drawn noise is within total variation t of ideal noise on both data sets, an event has at
    most P + t <= exp(epsilon) Q + delta + t <= exp(epsilon) (Q' + t) + delta + t.

    >>> sampler_delta(1.0, 1) / SAMPLER_TOTAL_VARIATION
    3.718281828459045
    """
    if not runs:
        return 0.0
    try:
        return runs * SAMPLER_TOTAL_VARIATION * (1 + math.exp(epsilon))
    except OverflowError:
        return math.inf


class DeltaTooSmall(ConfigError, ValueError):
    """Raised for a delta at which no guarantee can be certified."""


def largest_epsilon(delta: float, runs: int) -> float:
    """Returns the epsilon at which the sampler's share equals delta: the maximum of any guarantee.

    >>> round(largest_epsilon(1e-5, 1), 1)
    23.8
    """
    ratio = delta / (max(1, runs) * SAMPLER_TOTAL_VARIATION)
    return math.log(ratio - 1) if ratio > 2 else 0.0


def with_sampler_share(ideal: Callable[[float], float], delta: float, runs: int) -> float:
    """Returns epsilon at delta of the noise that is drawn, from the epsilon of ideal noise.

    Args:
      ideal: epsilon of ideal noise as a function of its delta.
      delta: total failure probability.
      runs: number of training runs in the event; each has its share of the sampler. 0: ideal noise.

    Returns: Epsilon; infinite if the sampler is too coarse for such an epsilon at this delta.

    Raises:
      DeltaTooSmall: delta is not a probability above the sampler's share.
    """
    least = sampler_delta(0.0, runs)
    if not (least < delta < 1):
        raise DeltaTooSmall(
            f"delta={delta:g} cannot be certified: it must be above {least:.2g}, the share of the "
            "noise sampler at epsilon 0, and below 1. Set delta to about users**-1.1"
        )
    share = max(least, delta * _FIRST_SHARE)
    while share < delta:
        epsilon = float(ideal(delta - share))
        needed = sampler_delta(epsilon, runs)
        if not needed > share:  # the caller rejects NaN
            return epsilon
        share = needed * (1 + _FIRST_SHARE)
    return math.inf
