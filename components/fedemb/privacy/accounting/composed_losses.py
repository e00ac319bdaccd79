"""Composes privacy losses by an FFT of tilted distributions, with a bound on its rounding error.

Composing T rounds is a T-fold convolution. An FFT of the plain distribution leaves an absolute
error of about 1e-17 T in delta, of either sign, which can exceed a small delta. Here each round is
first
tilted: masses are multiplied by exp(theta * loss) and scaled to sum to 1. The tilted sum is centred
    at the losses that determine delta, so the error of the FFT is relative to delta, not to 1. The
    error is bounded and added, and so are the mass beyond the window and every infinite loss. Delta
    and epsilon are therefore upper bounds at any size of delta
    (docs/privacy/accounting.md#grid-and-rounding).
"""

# scipy ships no types.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
from scipy import fft

from fedemb.privacy.accounting.fourier import Doubles, Spectrum, spectrum_of, values_of
from fedemb.privacy.accounting.gaussian_losses import Floats, GridLosses

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
        factors.append((spectrum_of(masses), count))
        with np.errstate(divide="ignore"):
            logs += count * np.log(np.abs(factors[-1][0]))
        start += count * (part.first + centre)
    kept = logs > -_LOG_NEGLIGIBLE
    phase = sum(count * np.angle(factor[kept]) for factor, count in factors)
    spectrum = np.zeros(logs.size, dtype=np.complex128)
    spectrum[kept] = np.exp(logs[kept] + 1j * phase)
    sums = values_of(spectrum, points)
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
