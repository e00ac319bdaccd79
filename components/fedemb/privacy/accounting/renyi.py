"""Renyi divergence of the group-Poisson pair, which no library provides.

Pair (docs/privacy/theorem.md#statement), in units of the clip: (1-q) N(0, s^2) + q N(+1, s^2)
against the mirror image (1-q) N(0, s^2) + q N(-1, s^2). It is symmetric under x -> -x, so both
directions agree.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import numpy.typing as npt
from jaxtyping import Float64

Floats = npt.NDArray[np.float64]

_NO_OVERLAP = 1 / 32
"""Noise multiplier below which the mixture's parts are integrated separately, without overlap."""


def group_pair_rdp(
    sampling_probability: float, noise_multiplier: float, orders: Float64[np.ndarray, " orders"]
) -> Float64[np.ndarray, " orders"]:
    """Returns the Renyi divergence of one round at each order.

    The trapezoid rule on an analytic integrand that vanishes at both ends converges exponentially:
    the nearest singularity is pi * noise_multiplier**2 off the real axis, so the steps below leave
    an error of exp(-4 * pi**2), 1e-17, or less.

    >>> float(group_pair_rdp(1.0, 2.0, np.array([3.0]))[0])  # plain Gaussian, distance 2 clips
    1.5

    Args:
      sampling_probability: probability of each virtual client, in (0, 1].
      noise_multiplier: standard deviation of the noise / clip.
      orders: Renyi orders above 1, `[orders]`.

    Returns:
      `[orders]` divergences.

    Raises:
      ValueError: an argument is out of bounds.
    """
    if not (0 < sampling_probability <= 1 and 0 < noise_multiplier < math.inf):
        raise ValueError(
            f"sampling_probability={sampling_probability} must be in (0, 1], and "
            f"noise_multiplier={noise_multiplier} positive and finite; correct the value"
        )
    values = [_one_order(sampling_probability, noise_multiplier, float(order)) for order in orders]
    return np.array(values, dtype=np.float64)


@functools.lru_cache(maxsize=4096)
def _one_order(q: float, sigma: float, order: float) -> float:
    if q == 1:
        return order * 4 / (2 * sigma**2)
    odds = math.log1p(-q) - math.log(q)
    if sigma < _NO_OVERLAP and sigma**2 * abs(odds) < 1 / 16:
        # A Gaussian of width sigma around 0, where neither data set moved, and one around `order`;
        # # the neglected part is below exp(-64) of it. Quadrature would take gigabytes here.
        moved = -order * odds + order * (order - 1) / (2 * sigma**2)
        return max(0.0, (math.log1p(-q) + float(np.logaddexp(0.0, moved))) / (order - 1))
    # The integrand p^order * r^(1-order) peaks between -1 and 2 * order - 1 and falls off like a
    # Gaussian of width sigma on both sides; 14 widths leave 1e-43 of the mass.
    step = min(sigma / 8, sigma**2 / 2)
    x = np.arange(-1 - 14 * sigma, 2 * order - 1 + 14 * sigma + step, step)
    # Everything relative to N(0, s^2), whose log-density is added at the end.
    up = np.logaddexp(math.log1p(-q), math.log(q) + (2 * x - 1) / (2 * sigma**2))
    down = np.logaddexp(math.log1p(-q), math.log(q) + (-2 * x - 1) / (2 * sigma**2))
    log_integrand = order * up + (1 - order) * down - x**2 / (2 * sigma**2)
    peak = float(log_integrand.max())
    total = float(np.exp(log_integrand - peak).sum()) * step
    log_moment = peak + math.log(total) - math.log(sigma * math.sqrt(2 * math.pi))
    return max(0.0, log_moment / (order - 1))
