"""What drawn noise costs beyond ideal noise: a share of delta, set aside before accounting."""

from __future__ import annotations

import math
from collections.abc import Callable

SAMPLER_TOTAL_VARIATION = 2.0**-51
"""Distance of one run's noise from true Gaussians, see `noise.TOTAL_VARIATION_PER_NORMAL`."""
_FIRST_SHARE = 1e-6
"""Part of delta set aside at first; nearly always more than is needed."""


def sampler_delta(epsilon: float, runs: int) -> float:
    """The part of delta that drawn noise needs beyond ideal noise.

    Of drawn noise within total variation t of the ideal on either data set, an event has at most
    P + t <= exp(epsilon) Q + delta + t <= exp(epsilon) (Q' + t) + delta + t.

    >>> sampler_delta(1.0, 1) / SAMPLER_TOTAL_VARIATION
    3.718281828459045
    """
    if not runs:
        return 0.0
    try:
        return runs * SAMPLER_TOTAL_VARIATION * (1 + math.exp(epsilon))
    except OverflowError:
        return math.inf


def with_sampler_share(ideal: Callable[[float], float], delta: float, runs: int) -> float:
    """Returns epsilon at delta of the noise that is drawn, from the epsilon of ideal noise.

    Args:
      ideal: epsilon of ideal noise as a function of its delta.
      delta: total failure probability.
      runs: training runs inside; each has its share of the sampler. 0: the noise is ideal.

    Returns:
      Epsilon; infinite where the sampler is too coarse for one so large at this delta.

    Raises:
      ValueError: delta is not a probability above the sampler's share.
    """
    least = sampler_delta(0.0, runs)
    if not (least < delta < 1):
        raise ValueError(
            f"delta={delta:g} must lie between the noise sampler's own share {least:.2g} and 1; "
            "customary is users**-1.1"
        )
    share = max(least, delta * _FIRST_SHARE)
    while share < delta:
        epsilon = float(ideal(delta - share))
        needed = sampler_delta(epsilon, runs)
        if not needed > share:  # NaN is the caller's to refuse
            return epsilon
        share = needed * (1 + _FIRST_SHARE)
    return math.inf
