"""Privacy losses of one round between two mixtures of Gaussians, on a grid.

The dominating pair is P against Q on the real line: P mixes unit normals shifted upwards, Q unit
normals shifted downwards, so the loss log(P/Q) grows with x. Between two neighbouring grid losses,
the real losses are replaced by the two ends, with the same mass under P and under Q. This is the
worst distribution with these masses (Doroshenko et al., arXiv 2207.04380), so epsilon can only be
too large. dp-accounting builds the same grid from differences of hockey-stick divergences, which
leaves an absolute error of about 1e-17 in delta per round. Here every mass is a difference of
normal tails and has a small relative error, however small the mass is.
"""

# scipy ships no types.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.special import ndtr

Floats = npt.NDArray[np.float64]
Mixture = Sequence[tuple[float, float]]
"""Weight and shift, in standard deviations of the noise, of each component."""

_REACH = 11.5
"""Standard deviations beyond the outermost component; the mass beyond is 7e-31."""
_LARGEST_EXPONENT = 600.0
"""Losses above this are rounded up to the grid without keeping the mass under Q."""
_TABLE = 1 << 14
"""Points of the table of initial values for the inverse of the loss."""
_SPLIT_ROUNDING = 2e-12
"""Bound on the rounding error of a round's mean loss: relative error of a cell's mass."""


@dataclass(frozen=True)
class GridLosses:
    """Distribution of the privacy loss of one event on multiples of a grid."""

    grid: float
    """Spacing of the losses."""
    first: int
    """The first loss is `first * grid`."""
    masses: Floats
    """Probability of each loss, `[points]`."""
    infinite: float = 0.0
    """Probability of an infinite loss."""
    slack: float = 0.0
    """Bound on the rounding error that may lower one loss."""

    @property
    def losses(self) -> Floats:
        """The losses, `[points]`."""
        return self.grid * np.arange(self.first, self.first + self.masses.size, dtype=np.float64)


def gaussian_losses(upper: Mixture, lower: Mixture, grid: float) -> GridLosses:
    """Returns the losses of a pair of Gaussian mixtures, each rounded up.

    Args:
      upper: mixture of the distribution that the loss is drawn from (P); shifts at or above 0.
      lower: mixture of the other distribution (Q); shifts at or below 0.
      grid: spacing of the losses.
    """
    upper = [pair for pair in upper if pair[0] > 0]
    lower = [pair for pair in lower if pair[0] > 0]
    low = min(shift for _, shift in upper) - _REACH
    high = max(shift for _, shift in upper) + _REACH
    ends, _ = _loss(np.array([low, high]), upper, lower)
    first, last = math.floor(ends[0] / grid), max(math.ceil(ends[1] / grid), 1)
    last = max(last, first + 1)
    targets = grid * np.arange(first + 1, last, dtype=np.float64)
    inner, missed = _where_loss_is(targets, low, high, upper, lower)
    edges = np.concatenate([[low], inner, [high]])
    above = _cells(edges, upper)
    below = _cells(edges, lower)
    starts = grid * np.arange(first, last, dtype=np.float64)
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        ratio = below * np.exp(np.minimum(starts, _LARGEST_EXPONENT)) / above
    up = np.clip((1 - ratio) / -math.expm1(-grid), 0.0, 1.0)
    # If the ratio has no significant digits, the whole cell moves to its upper end.
    up = above * np.where(np.isfinite(up) & (starts < _LARGEST_EXPONENT), up, 1.0)
    masses = np.zeros(last - first + 1)
    masses[:-1] += above - up
    masses[1:] += up
    masses[0] += sum(weight * float(ndtr(low - shift)) for weight, shift in upper)
    infinite = sum(weight * float(ndtr(shift - high)) for weight, shift in upper)
    return GridLosses(grid, first, masses, infinite, missed + _SPLIT_ROUNDING)


def _loss(x: Floats, upper: Mixture, lower: Mixture) -> tuple[Floats, Floats]:
    """Returns the privacy loss at x and its derivative."""
    value, slope = _log_density(x, upper)
    other, other_slope = _log_density(x, lower)
    return value - other, slope - other_slope


def _log_density(x: Floats, mixture: Mixture) -> tuple[Floats, Floats]:
    """Returns the log of a mixture's density relative to a standard normal, and its derivative."""
    if len(mixture) == 1:
        ((_, shift),) = mixture
        return shift * x - shift**2 / 2, np.full_like(x, shift)
    terms = [math.log(weight) + shift * x - shift**2 / 2 for weight, shift in mixture]
    peak = _largest(terms)
    total, moment = np.zeros_like(x), np.zeros_like(x)
    for term, (_, shift) in zip(terms, mixture, strict=True):
        part = np.exp(term - peak)
        total += part
        moment += shift * part
    return peak + np.log(total), moment / total


def _largest(terms: Sequence[Floats]) -> Floats:
    """Returns the elementwise maximum of several arrays."""
    peak = terms[0]
    for term in terms[1:]:
        peak = np.maximum(peak, term)
    return peak


def _where_loss_is(
    targets: Floats, low: float, high: float, upper: Mixture, lower: Mixture
) -> tuple[Floats, float]:
    """Returns the points where the loss equals each ascending target, and the largest error."""
    if not targets.size:
        return targets, 0.0
    if len(upper) == len(lower) == 1:
        ((_, a),), ((_, b),) = upper, lower
        return (targets / (a - b)) + (a + b) / 2, 0.0
    table = np.linspace(low, high, _TABLE)
    values, _ = _loss(table, upper, lower)
    cell = np.clip(np.searchsorted(values, targets), 1, _TABLE - 1)
    left, right = table[cell - 1], table[cell]
    x = np.interp(targets, values, table)
    for _ in range(20):
        found, slope = _loss(x, upper, lower)
        error = found - targets
        if float(np.abs(error).max()) <= 4e-16 * (1 + float(np.abs(targets).max())):
            break
        # Clamped to its cell, so that Newton's steps cannot diverge.
        left, right = np.where(error < 0, x, left), np.where(error > 0, x, right)
        with np.errstate(divide="ignore", invalid="ignore"):
            step = x - error / slope
        inside = (step >= left) & (step <= right)
        x = np.where(inside, step, (left + right) / 2)
    found, _ = _loss(x, upper, lower)
    return np.maximum.accumulate(x), float(np.abs(found - targets).max())


def _cells(edges: Floats, mixture: Mixture) -> Floats:
    """Returns a mixture's mass between edges, `[edges - 1]`, with small relative errors."""
    total = np.zeros(edges.size - 1)
    for weight, shift in mixture:
        place = edges - shift
        from_left, from_right = np.diff(ndtr(place)), -np.diff(ndtr(-place))
        total += weight * np.where(place[:-1] < 0, from_left, from_right)
    return total
