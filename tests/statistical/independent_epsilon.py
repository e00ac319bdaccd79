"""Epsilon computed without the product and without dp-accounting, to compare with.

    python -m tests.statistical.independent_epsilon

prints a table of both figures. The method shares nothing with the product but the two densities:

- losses are atoms of a trapezoid rule over the noised sum, held as logarithms;
- each atom is split between the two nearest losses of a fine grid so that its mean stays;
- the atoms are tilted by exp(theta * loss), so that the FFT's error is relative to delta;
- epsilon is found by bisection on delta.

Splitting adds at most spacing^2 / 4 to the variance of one round's loss, so the figure is too large
by about 1e-5 at 1e5 rounds, and never too small but for the FFT's rounding of the tilted sum.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy import fft

POINTS = 1 << 17
SPACING = 1e-4


@dataclass(frozen=True)
class Pair:
    """Densities of the noised sum in the two worlds, up to a common factor, as logarithms."""

    name: str
    q: float
    sigma: float

    def log_densities(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Of the world the loss is drawn from and of the other, at sums x in units of the clip."""

        def normal(at: float) -> np.ndarray:
            return -((x - at) ** 2) / (2 * self.sigma**2)

        def mixed(at: float) -> np.ndarray:
            if self.q == 1:
                return normal(at)
            return np.logaddexp(math.log1p(-self.q) + normal(0), math.log(self.q) + normal(at))

        worlds = {
            "remove": (mixed(1), normal(0)),
            "add": (normal(0), mixed(1)),
            "replace": (mixed(1), mixed(-1)),
        }
        return worlds[self.name]


class Composed:
    """The losses of `rounds` rounds of a pair."""

    def __init__(self, pair: Pair, rounds: int):
        self.rounds = rounds
        x = np.linspace(-2 - 14 * pair.sigma, 2 + 14 * pair.sigma, POINTS)
        ours, theirs = pair.log_densities(x)
        logs = ours - math.log(pair.sigma * math.sqrt(2 * math.pi)) + math.log(x[1] - x[0])
        self.losses, self.logs = ours - theirs, logs

    def _moments(self, tilt: float) -> tuple[float, float, float, np.ndarray]:
        exponents = self.logs + tilt * self.losses
        peak = exponents.max()
        weights = np.exp(exponents - peak)
        total = weights.sum()
        weights /= total
        mean = float(weights @ self.losses)
        spread = float(weights @ (self.losses - mean) ** 2)
        return float(peak + math.log(total)), mean, spread, weights

    def curve(self, delta: float) -> tuple[np.ndarray, np.ndarray]:
        """Losses and the logs of their masses near the epsilon of a delta."""
        low, high = 0.0, 1.0
        while self._log_tail(high) > math.log(delta):
            high *= 2
        for _ in range(16):
            middle = (low + high) / 2
            low, high = (
                (middle, high) if self._log_tail(middle) > math.log(delta) else (low, middle)
            )
        log_moment, mean, spread, weights = self._moments(high)
        places = self.losses / SPACING
        floor = np.floor(places).astype(np.int64)
        part = places - floor
        width = 40 * math.sqrt(self.rounds * spread) + 60 / max(high, 0.2) + 2
        points = fft.next_fast_len(int(width / SPACING))
        centre = round(mean / SPACING)
        folded = np.zeros(points)
        np.add.at(folded, (floor - centre) % points, weights * (1 - part))
        np.add.at(folded, (floor + 1 - centre) % points, weights * part)
        sums = fft.irfft(fft.rfft(folded) ** self.rounds, points)
        start = -points // 3
        kept = np.roll(sums, -start)
        offset = self.rounds * centre + start
        losses = SPACING * np.arange(offset, offset + points)
        with np.errstate(divide="ignore", invalid="ignore"):
            logs = np.log(np.maximum(kept, 0)) - high * losses + self.rounds * log_moment
        # Below the noise of the transform nothing is known; it is far from the epsilon sought.
        logs[kept < 1e-13 * kept.max()] = -np.inf
        return losses, logs

    def _log_tail(self, tilt: float) -> float:
        log_moment, mean, _, _ = self._moments(tilt)
        return self.rounds * (log_moment - tilt * mean)

    def epsilon(self, delta: float) -> float:
        """Epsilon of ideal noise at a delta."""
        losses, logs = self.curve(delta)

        def spent(epsilon: float) -> float:
            above = losses > epsilon
            return float(np.sum(np.exp(logs[above]) * -np.expm1(epsilon - losses[above])))

        low, high = 0.0, float(losses[np.isfinite(logs)][-1])
        if spent(0.0) <= delta:
            return 0.0
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if spent(middle) > delta else (low, middle)
        return high


def add_or_remove(q: float, sigma: float, rounds: int, delta: float) -> float:
    """Epsilon of Poisson sampling at probability q, one unit added or removed."""
    return max(Composed(Pair(n, q, sigma), rounds).epsilon(delta) for n in ("remove", "add"))


def replace(q: float, sigma: float, rounds: int, delta: float) -> float:
    """Epsilon of whole virtual clients sampled at probability q, one update replaced."""
    return Composed(Pair("replace", q, sigma), rounds).epsilon(delta)
