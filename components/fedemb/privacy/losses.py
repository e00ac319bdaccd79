"""Privacy losses of a run, composed on a grid; epsilon can only be too large."""

# The numeric libraries are not fully typed; the project's own signatures are checked.
# pyright: reportMissingTypeStubs=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt
from dp_accounting import dp_event as dpe
from dp_accounting.privacy_accountant import NeighboringRelation
from scipy import fft
from scipy.special import ndtr

from fedemb.privacy.guarantee import event_from_json, event_to_json

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


Doubles = npt.NDArray[np.float64]
Spectrum = npt.NDArray[np.complex128]


# Composes privacy losses by an FFT of tilted distributions, with a bound on its rounding error.
#
# Composing T rounds is a T-fold convolution. An FFT of the plain distribution leaves an absolute
# error of about 1e-17 T in delta, of either sign, which can exceed a small delta. Here each round
# is first tilted: masses are multiplied by exp(theta * loss) and scaled to sum to 1. The tilted
# sum is centred at the losses that determine delta, so the error of the FFT is relative to delta,
# not to 1. The error is bounded and added, and so are the mass beyond the window and every
# infinite loss. Delta and epsilon are therefore upper bounds at any size of delta
# (docs/privacy/accounting.md#grid-and-rounding).


Parts = Sequence[tuple[GridLosses, int]]
"""Losses of one round, and the number of such rounds."""

_DECADES = 4.0
"""Powers of ten of delta that share one tilt, chosen for their middle."""
_LOG_ALIASED = 21.0
"""Log bound of the tilted mass outside the window on either side: exp(-21), 8e-10; it is added."""
_LOG_NEGLIGIBLE = 60.0
"""Fourier coefficients below exp(-60) are dropped; the same amount is added to every mass."""
_RELATIVE = 2.0**-15
"""Share of delta reserved for rounding, besides that per round; it moves epsilon by 1e-5."""
_RELATIVE_PER_ROUND = 4e-14
"""Relative error of one round's tilted masses: exponents up to 100, rounded to 53 bits."""
_STEPS = (2.0, 3.2, 4.5, 6.5)
"""Changes of the tilt for finding the window, in standard deviations."""
_FFT_ROUNDING = 2.0**-51
"""Error of a Fourier coefficient of a distribution / log2(points). Measured against 80-bit FFTs: at
most an eighth of it."""
_COARSE = 4096
"""Points of the copy used to choose the tilt."""
_SHALLOWEST = 1e-9
_STEEPEST = 2.0**40
"""Maximum tilt."""
_LONGEST = 1 << 24
"""Maximum points of a window: enough for an epsilon of 5,000 on the fine grid."""
_HIGHEST = 300.0
"""Largest exponent of a weight; larger exponents are far below epsilon."""


class ComposedLosses:
    """Losses of all rounds together, drawn with or without the unit.

    Args:
      parts: losses of each kind of round on one grid, and their number.
    """

    def __init__(self, parts: Parts):
        self._parts = list(parts)
        self._coarse = [_coarse(part) for part, _ in self._parts]
        self._curves: dict[float, _TiltedCurve] = {}
        never = sum(
            count * math.log1p(-min(1.0, part.infinite)) if part.infinite < 1 else -math.inf
            for part, count in self._parts
        )
        self.infinite = -math.expm1(never)
        """Probability of an infinite loss."""
        rounds = sum(count for _, count in self._parts)
        self._share = _RELATIVE + rounds * _RELATIVE_PER_ROUND
        self._slack = sum(count * part.slack for part, count in self._parts)

    def epsilon(self, delta: float) -> float:
        """Returns an upper bound on epsilon at a delta.

        Infinite if delta cannot be reached, or if the losses are too many to compose.
        """
        left = (delta - self.infinite) / (1 + self._share)
        if not left > 0:
            return math.inf
        if not self._parts:
            return 0.0
        middle = 10 ** (_DECADES * (math.floor(math.log10(left) / _DECADES) + 0.5))
        try:
            found = self._at(self._tilt_for_delta(middle)).epsilon(left)
        except OverflowError:  # losses exceed memory, at an epsilon too large to be useful
            return math.inf
        return found + self._slack if found else 0.0

    def delta(self, epsilon: float) -> float:
        """Returns an upper bound on delta at an epsilon."""
        if not self._parts:
            return self.infinite
        at = max(0.0, epsilon - self._slack)
        ideal = self._at(self._tilt_for_loss(at)).delta(at)
        return min(1.0, self.infinite + (1 + self._share) * ideal)

    def _at(self, tilt: float) -> _TiltedCurve:
        if tilt not in self._curves:
            self._curves[tilt] = _tilted_curve(self._parts, tilt)
        return self._curves[tilt]

    def _cumulants(self, tilt: float) -> tuple[float, float]:
        """Returns the approximate log moment generating function of the sum and its derivative."""
        log_moment = mean = 0.0
        for (losses, logs), (_, count) in zip(self._coarse, self._parts, strict=True):
            exponents = logs + tilt * losses
            peak = float(exponents.max())
            weights = np.exp(exponents - peak)
            total = float(weights.sum())
            log_moment += count * (peak + math.log(total))
            mean += count * float(weights @ losses) / total
        return log_moment, mean

    def _tilt_for_delta(self, delta: float) -> float:
        """Returns the tilt whose mean is about the epsilon of a delta, if that is above 0."""

        def excess(tilt: float) -> float:
            log_moment, mean = self._cumulants(tilt)
            return log_moment - tilt * mean - math.log(delta)

        tilt = _root(excess)
        _, mean = self._cumulants(tilt)
        return tilt if mean > 0 else self._tilt_for_loss(0.0)

    def _tilt_for_loss(self, loss: float) -> float:
        """Returns the tilt whose mean is about a loss."""
        return _root(lambda tilt: loss - self._cumulants(tilt)[1])


@dataclass(frozen=True)
class _TiltedCurve:
    """The upper tail of the composed losses, computed with one tilt."""

    losses: Floats
    """`[points]`, ascending."""
    masses: Floats
    """Upper bounds on the tilted mass of each loss, `[points]`."""
    tilt: float
    centre: float
    """Mean of the tilted masses."""
    log_moment: float
    """Log of the divisor of the tilted masses."""

    def _weights(self, epsilon: float) -> tuple[Floats, float]:
        """Returns untilted masses / exp(scale)."""
        exponents = np.minimum(self.tilt * (epsilon - self.losses), _HIGHEST)
        return self.masses * np.exp(exponents), self.log_moment - self.tilt * epsilon

    def delta(self, epsilon: float) -> float:
        """Returns the hockey-stick divergence at exp(epsilon)."""
        weights, scale = self._weights(epsilon)
        above = self.losses > epsilon
        total = float(weights[above] @ -np.expm1(epsilon - self.losses[above]))
        return math.exp(min(0.0, math.log(total) + scale)) if total > 0 else 0.0

    def epsilon(self, delta: float) -> float:
        """Returns the least epsilon at or above 0 whose divergence is at most delta."""
        # Weights fall like exp(-tilt * loss); those far above the centre are negligible.
        at, lowest = self.centre, max(0.0, self.centre - _HIGHEST / (1 + self.tilt))
        highest = at + 1 + _LOG_NEGLIGIBLE / max(self.tilt, _SHALLOWEST)
        first, last = np.searchsorted(self.losses, [lowest, highest])
        first = min(int(first), self.losses.size - 1)
        losses = self.losses[first : max(first + 1, int(last))]
        weights = self.masses[first : first + losses.size] * np.exp(self.tilt * (at - losses))
        others = weights * np.exp(at - losses)
        above = np.cumsum(weights[::-1])[::-1] - weights
        below = np.cumsum(others[::-1])[::-1] - others
        target = math.exp(math.log(delta) + self.tilt * at - self.log_moment)
        reached = above - np.exp(np.minimum(losses - at, _HIGHEST)) * below <= target
        index = int(np.argmax(reached))  # the divergence at the last loss is 0
        if index == 0 and lowest > 0:
            return float(losses[0])
        # Just below this loss the divergence is A - exp(epsilon) B, summed from this loss on.
        most, least = float(weights[index:].sum()), float(others[index:].sum())
        left = most - target
        if left > 0 and least > 0:  # else the weight of the losses underflows
            return max(0.0, at + math.log(left / least))
        return float(losses[index]) if index or left > 0 else 0.0


def _tilted_curve(parts: Parts, tilt: float) -> _TiltedCurve:
    grid, rounds = parts[0][0].grid, sum(count for _, count in parts)
    rows = [_Row(part) for part, _ in parts]
    counts = [count for _, count in parts]
    tilted = [row.tilted(tilt) for row in rows]
    base = sum(c * row.log_moment(tilt) for c, row in zip(counts, rows, strict=True))
    low, high = _window(rows, counts, tilted, tilt, base)
    points = cast("int", fft.next_fast_len(high - low + 1, real=True))
    if points > _LONGEST:
        raise OverflowError(f"{points} losses at spacing {grid:g} are too many")
    logs: Doubles = np.zeros(points // 2 + 1)
    factors: list[tuple[Spectrum, int]] = []
    start = 0
    for (part, count), weights in zip(parts, tilted, strict=True):
        centre = round(float(weights @ np.arange(weights.size)))
        places = (np.arange(weights.size) - centre) % points
        masses = cast("Doubles", np.bincount(places, weights=weights, minlength=points))
        factors.append((cast("Spectrum", fft.rfft(masses)), count))
        with np.errstate(divide="ignore"):
            logs += count * np.log(np.abs(factors[-1][0]))
        start += count * (part.first + centre)
    kept = logs > -_LOG_NEGLIGIBLE
    phase = sum(count * np.angle(factor[kept]) for factor, count in factors)
    spectrum = np.zeros(logs.size, dtype=np.complex128)
    spectrum[kept] = np.exp(logs[kept] + 1j * phase)
    sums = cast("Doubles", fft.irfft(spectrum, points))
    # Errors of coefficients grow with their power; the inverse transform averages them.
    size = 2 * float(np.exp(logs[kept]).sum()) / points
    error = (1 + rounds) * _FFT_ROUNDING * math.log2(points) * size + math.exp(-_LOG_NEGLIGIBLE)
    sums = np.roll(np.maximum(sums, 0.0) + error, start - low)
    # The mass beyond the window counts at its upper end, and again where it is folded back.
    sums[-1] += math.exp(-_LOG_ALIASED)
    losses = grid * np.arange(low, low + points, dtype=np.float64)
    centre = sum(c * float(w @ row.losses) for c, w, row in zip(counts, tilted, rows, strict=True))
    return _TiltedCurve(losses, sums, tilt, centre, base)


class _Row:
    """Losses of one part and the logs of their masses, for several tilts."""

    def __init__(self, part: GridLosses):
        kept = np.flatnonzero(part.masses)
        self.losses = part.losses
        with np.errstate(divide="ignore"):
            self._logs = np.log(part.masses)
        self.lowest, self.highest = float(self.losses[kept[0]]), float(self.losses[kept[-1]])

    def tilted(self, tilt: float) -> Floats:
        """Returns tilted masses, which sum to 1."""
        return np.exp(self._logs + tilt * self.losses - self.log_moment(tilt))

    def log_moment(self, tilt: float) -> float:
        """Returns the log of the mean of exp(tilt * loss)."""
        exponents = self._logs + tilt * self.losses
        peak = float(exponents.max())
        return peak + math.log(float(np.exp(exponents - peak).sum()))


def _window(
    rows: Sequence[_Row], counts: Sequence[int], tilted: Sequence[Floats], tilt: float, base: float
) -> tuple[int, int]:
    """Returns grid bounds of the tilted sum, except for the `_LOG_ALIASED` mass, by Chernoff."""
    grid = float(rows[0].losses[1] - rows[0].losses[0])
    spread = 0.0
    for row, count, weights in zip(rows, counts, tilted, strict=True):
        mean = float(weights @ row.losses)
        spread += count * float(weights @ np.square(row.losses - mean))
    ups = [sum(c * row.highest for c, row in zip(counts, rows, strict=True))]
    downs = [sum(c * row.lowest for c, row in zip(counts, rows, strict=True))]
    for step in _STEPS:
        change = step / (math.sqrt(spread) + grid)
        for ends, signed in ((ups, change), (downs, -change)):
            moved = sum(
                c * row.log_moment(tilt + signed) for c, row in zip(counts, rows, strict=True)
            )
            ends.append((moved - base + _LOG_ALIASED) / signed)
    return math.floor(max(downs) / grid) - 1, math.ceil(min(ups) / grid) + 1


def _coarse(part: GridLosses) -> tuple[Floats, Floats]:
    """Returns losses and log-masses of a copy with few points, sufficient for choosing a tilt."""
    width = -(-part.masses.size // _COARSE)
    blocks = np.arange(0, part.masses.size, width)
    masses = np.add.reduceat(part.masses, blocks)
    moments = np.add.reduceat(part.masses * part.losses, blocks)
    kept = masses > 0
    return moments[kept] / masses[kept], np.log(masses[kept])


def _root(excess: Callable[[float], float]) -> float:
    """Returns an approximate root of a falling function of the tilt, or the last tilt tried."""
    from scipy.optimize import brentq  # 0.1 s, also where nothing is priced

    if excess(0.0) <= 0:
        return 0.0
    high = 1.0
    while excess(high) > 0:
        if high >= _STEEPEST:
            return high
        high *= 2
    return cast(
        "float", brentq(excess, 0.0 if high == 1.0 else high / 2, high, rtol=np.float64(1e-3))
    )


# Selects the grid of an event's privacy losses, and computes a quick upper bound for searches.
#
# Losses are rounded so that epsilon can only be too large on any grid. A coarse grid is valid but
# pessimistic. Its error follows from the spacing: rounding adds at most spacing^2 / 4 to the
# variance of one round's loss.


Directions = tuple[GridLosses, ...]
"""Losses with the unit against without, and the reverse unless both are equal."""

DISCRETISATION = 1e-4
"""Grid spacing of the privacy losses of every guarantee."""
QUICK_TOLERANCE = 1e-3
"""Maximum relative excess of `quick_epsilon` over the value on the fine grid."""
_FINE_REACH = 100.0
"""Maximum privacy loss of one round on the fine grid: noise multipliers above 0.24."""
_COARSE_POINTS = 2e6
"""Maximum points of the grid of a whole run beyond that loss."""
_MIXTURE_POINTS = 200_000
"""Maximum points of the grid of one mixture of Gaussians; each point is searched separately, which
takes 15 microseconds."""
_FIRST_GRID = 0.02
"""Initial grid spacing of `quick_epsilon`."""


def discretisation(event: dpe.DpEvent) -> float:
    """Returns the grid of privacy losses of an event: fine, unless little noise makes it too large.

    At noise multiplier 0.01, one round's losses reach 20,000. A grid of 1e-4 would take hours and
    all memory, for an epsilon that is useless. Estimates are pessimistic on any grid.
    """
    reaches = list(_reaches(event, 1))
    finest = max([DISCRETISATION, *(span / _MIXTURE_POINTS for span in _spans(event))])
    if all(reach <= _FINE_REACH for reach, _ in reaches):
        return finest
    return max(finest, sum(reach * times for reach, times in reaches) / _COARSE_POINTS)


def pld_of(event: dpe.DpEvent, relation: NeighboringRelation) -> PrivacyLosses:
    """Returns the losses of an event on its `discretisation`; the result is cached."""
    return _kept(_key(event), relation)


def quick_epsilon(event: dpe.DpEvent, relation: NeighboringRelation, delta: float) -> float:
    """Returns an upper bound on epsilon, at most `QUICK_TOLERANCE` too large, in 1/10 of the time.

    For curves and searches; never reported as a guarantee. The grid is refined until it suits the
    epsilon found: over T rounds, a spacing of g costs about 2 T g^2 / epsilon (measured, for
    epsilon from 0.02 to 20). It is never finer than `discretisation`, where both values are equal.
    """
    return _quick(_key(event), relation, delta)


@functools.lru_cache(maxsize=1024)
def _quick(key: str, relation: NeighboringRelation, delta: float) -> float:
    event = event_from_json(json.loads(key))
    rounds = max(1, sum(times for _, times in _reaches(event, 1)))
    finest = discretisation(event)
    grid = max(finest, _FIRST_GRID)
    while True:
        if grid == finest:
            return _kept(key, relation).get_epsilon(delta)
        epsilon = PrivacyLosses(event, relation, grid).get_epsilon(delta)
        wanted = max(finest, epsilon * math.sqrt(QUICK_TOLERANCE / 8 / rounds))
        if not wanted < 0.8 * grid:
            return epsilon
        grid = wanted


@functools.lru_cache(maxsize=64)
def _kept(key: str, relation: NeighboringRelation) -> PrivacyLosses:
    event = event_from_json(json.loads(key))
    return PrivacyLosses(event, relation, discretisation(event))


class PrivacyLosses:
    """The privacy losses of an event on one grid, in both directions.

    Args:
      event: composed event; the dispatch table must list it under PLD.
      relation: neighbouring relation of the event.
      grid: spacing of the losses.
    """

    def __init__(self, event: dpe.DpEvent, relation: NeighboringRelation, grid: float):
        self._relation, self._grid = relation, grid
        self._parts: list[tuple[Directions, int]] = []
        self._gaussians = 0.0
        self._private = True
        try:
            self._walk(event, 1)
            if self._gaussians:
                self._parts.append((self._mixture([1.0], [1.0], self._gaussians**-0.5), 1))
        except OverflowError:  # losses beyond float64: no meaningful privacy
            self._private = False
        ways = (0, 1) if any(len(directions) > 1 for directions, _ in self._parts) else (0,)
        self.directions = [
            ComposedLosses(
                [(directions[-1 if way else 0], count) for directions, count in self._parts]
            )
            for way in ways
        ]
        """Losses drawn with the unit and, unless both are equal, drawn without it."""

    def get_epsilon(self, delta: float) -> float:
        """Returns an upper bound on epsilon of ideal noise at a delta."""
        if not self._private:
            return math.inf
        return max(losses.epsilon(delta) for losses in self.directions)

    def get_delta(self, epsilon: float) -> float:
        """Returns an upper bound on delta of ideal noise at an epsilon."""
        if not self._private:
            return 1.0
        return max(losses.delta(epsilon) for losses in self.directions)

    def _walk(self, event: dpe.DpEvent, times: int) -> None:
        match event:
            case dpe.NoOpDpEvent():
                return
            case dpe.SelfComposedDpEvent():
                self._walk(event.event, times * event.count)
            case dpe.ComposedDpEvent():
                for inner in event.events:
                    self._walk(inner, times)
            case dpe.GaussianDpEvent() if event.noise_multiplier > 0:
                # Gaussians compose exactly to one Gaussian.
                self._gaussians += times / event.noise_multiplier**2
            case dpe.PoissonSampledDpEvent(event=dpe.GaussianDpEvent(noise_multiplier=sigma)) if (
                sigma > 0
            ):
                q = event.sampling_probability
                self._parts.append((self._mixture([1 - q, q], [0.0, 1.0], sigma), times))
            case dpe.MixtureOfGaussiansDpEvent() if event.standard_deviation > 0:
                chances, moved = event.sampling_probs, event.sensitivities
                sigma = event.standard_deviation
                self._parts.append((self._mixture(chances, moved, sigma), times))
            case _:
                self._private = False

    def _mixture(
        self, chances: Sequence[float], moved: Sequence[float], sigma: float
    ) -> Directions:
        """Returns losses of a sum that moves by one of several lengths, in clipping norms."""
        pairs = [(chance, move / sigma) for chance, move in zip(chances, moved, strict=True)]
        up = tuple(sorted(pair for pair in pairs if pair[0] > 0))
        down = tuple((chance, -shift) for chance, shift in up)
        if self._relation is NeighboringRelation.REPLACE_ONE:
            return (_losses(up, down, self._grid),)
        still = ((1.0, 0.0),)
        if len(up) == 1:  # by symmetry both directions are equal
            return (_losses(up, still, self._grid),)
        return _losses(up, still, self._grid), _losses(still, down, self._grid)


@functools.lru_cache(maxsize=32)
def _losses(upper: Mixture, lower: Mixture, grid: float) -> GridLosses:
    return gaussian_losses(upper, lower, grid)


def _key(event: dpe.DpEvent) -> str:
    return json.dumps(event_to_json(event))


def _reaches(event: dpe.DpEvent, times: int) -> Iterator[tuple[float, int]]:
    """Yields the largest relevant privacy loss of each nested Gaussian, and its repetitions."""
    match event:
        case dpe.GaussianDpEvent():
            if event.noise_multiplier > 0:
                yield 2 / event.noise_multiplier**2 + 16 / event.noise_multiplier, times
        case dpe.MixtureOfGaussiansDpEvent():
            yield 0.0, times  # all images at once reach far, with negligible probability
        case dpe.SelfComposedDpEvent():
            yield from _reaches(event.event, times * event.count)
        case dpe.PoissonSampledDpEvent():
            yield from _reaches(event.event, times)
        case dpe.ComposedDpEvent():
            for inner in event.events:
                yield from _reaches(inner, times)
        case _:
            return


def _spans(event: dpe.DpEvent) -> Iterator[float]:
    """Yields the largest privacy loss of each nested mixture of Gaussians, however unlikely."""
    match event:
        case dpe.MixtureOfGaussiansDpEvent():
            moved = max(event.sensitivities) / event.standard_deviation
            yield moved**2 / 2 + 8 * moved
        case dpe.SelfComposedDpEvent() | dpe.PoissonSampledDpEvent():
            yield from _spans(event.event)
        case dpe.ComposedDpEvent():
            for inner in event.events:
                yield from _spans(inner)
        case _:
            return
