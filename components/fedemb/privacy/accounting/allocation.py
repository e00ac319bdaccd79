"""Random allocation: each unit in exactly one of t rounds, at random and in secret.

With the unit, the t noised sums are a mixture of t Gaussians, one per round; without it they are
plain noise. The density ratio is the mean of t independent log-normal numbers, so the distribution
of its logarithm, the privacy loss, follows from a convolution (Feldman and Shenfeld, ICML 2026,
arXiv 2602.17284; Monte Carlo in Chua et al., arXiv 2412.16802). One dimension and a fixed vector
suffice: a noised sum that a unit moves by at most C is post-processing of one that it moves by
exactly C, round by round and given all earlier rounds.
"""

# The numeric libraries ship no types; the project's own signatures are checked.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import functools
import math
from typing import cast

import numpy as np
from scipy.special import ndtr

from fedemb.privacy.accounting.fourier import Doubles, spectrum_of, values_of
from fedemb.privacy.accounting.gaussian_losses import GridLosses

_TAIL = 7.0
"""Standard deviations beyond which normals count as an infinite loss (probability 1.3e-12)."""
_SHORTEST_TAIL = 3.0
"""The same limit for noise so small that ratios up to `_TAIL` do not fit on a grid."""
_COARSEST = 0.1
"""Maximum spacing of that grid, if the number of rounds is small enough."""
_SPACING = 2e-4
"""Grid spacing of one log-normal number, whose mean is 1."""
_MOST_POINTS = 2**22
"""Maximum points of that grid; less noise or more rounds give a coarser, more pessimistic grid."""
_ROUNDING = 2.0**-52
"""Error of a Fourier coefficient of a distribution / log2(points). Its sum over all points is a
probability that counts as an infinite loss. Measured against 80-bit FFTs: at most a quarter."""


@functools.lru_cache(maxsize=32)
def allocation_losses(
    steps: int, noise_multiplier: float, grid: float
) -> tuple[GridLosses, GridLosses]:
    """Returns privacy losses of one Gaussian in one of `steps` rounds, each rounded up.

    Args:
      steps: number of rounds to choose from (t).
      noise_multiplier: noise of each round's sum, for a unit that moves it by 1.
      grid: spacing of the losses.

    Returns: Losses drawn with the unit, and losses drawn without the unit.

    Raises:
      OverflowError: noise so small that ratios, 1 on average, fall between two grid points.
    """
    return (
        _losses(steps, noise_multiplier, grid, with_unit=True),
        _losses(steps, noise_multiplier, grid, with_unit=False),
    )


def _losses(steps: int, noise: float, grid: float, *, with_unit: bool) -> GridLosses:
    """Returns the losses drawn with or without the unit.

    Ratios of densities, with over without the unit, are rounded towards the larger loss: up with
    the unit, down without it.
    """
    largest, reach = _ends(steps, noise, _TAIL)
    if reach > _MOST_POINTS:  # truncated where the grid still resolves ratios near 1
        tail = noise * (math.log(_COARSEST * _MOST_POINTS / 8) - 0.5 / noise**2)
        largest, reach = _ends(steps, noise, max(tail, _SHORTEST_TAIL))
    if reach > _MOST_POINTS:
        raise OverflowError(f"noise multiplier {noise:g} leaves losses that no grid holds")
    points = min(_MOST_POINTS, 2 ** math.ceil(math.log2(reach / _SPACING)))
    edges: Doubles = np.arange(points + 1, dtype=np.float64) * (reach / points)

    def chances(shift: float) -> Doubles:
        """Returns cell probabilities of a log-normal number, at the upper or lower point."""
        with np.errstate(divide="ignore"):
            below = ndtr(noise * np.log(np.minimum(edges, largest)) + shift / noise)
        inside = np.diff(below)
        return np.concatenate([[0.0], inside[:-1]]) if with_unit else inside

    absent = chances(0.5)
    last = chances(-0.5) if with_unit else absent
    power = spectrum_of(absent) ** (steps - 1) * spectrum_of(last)
    total: Doubles = np.maximum(values_of(power, points), 0.0)
    with np.errstate(divide="ignore"):
        losses = np.log(edges[:-1] / steps) * (1 if with_unit else -1)
    real = np.isfinite(losses) & (total > 0)
    bins = np.ceil(losses[real] / grid).astype(np.int64)
    first = int(bins.min())
    summed = cast("Doubles", np.bincount(bins - first, weights=total[real]))
    # Mass outside the grid, at either end, counts as an infinite loss; so does the mass that the #
    # transform folds back to its start, and its rounding errors.
    missing = max(0.0, 1.0 - float(summed.sum())) + _folded(absent, last, edges, steps, largest)
    missing += steps * _ROUNDING * math.log2(points) * 2 * float(np.abs(power).sum())
    return GridLosses(grid, first, summed, min(1.0, missing))


def _ends(steps: int, noise: float, tail: float) -> tuple[float, float]:
    """Returns the largest ratio that is kept, and the end of the grid."""
    largest = math.exp(tail / noise + 0.5 / noise**2)
    spread = math.sqrt(math.expm1(1 / noise**2))
    return largest, steps + 12 * spread * math.sqrt(steps) + 4 * largest


def _folded(absent: Doubles, last: Doubles, edges: Doubles, steps: int, largest: float) -> float:
    """Returns Chernoff's bound on the probability of a sum beyond the grid."""
    used = np.flatnonzero(absent + last)
    values, reach = edges[used], float(edges[-1])
    chances = np.stack([absent[used], last[used]])
    bounds, step = [0.0], np.exp(values / largest)
    powers = np.ones_like(step)
    for slope in np.arange(1, 40) / largest:
        powers *= step  # exp(slope * values)
        others, one = chances @ powers
        moment = (steps - 1) * math.log(others) + math.log(one)
        bounds.append(moment - slope * reach)
    return math.exp(min(bounds))
