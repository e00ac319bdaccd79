"""Bootstrap over identities: an estimate keeps its draws, so that differences can be paired.

Each draw samples all identities with replacement. The same seed and number of identities give the
same draws for every metric. If identities come in groups (alphabets, tracks, stores) and new groups
may differ, a draw samples groups first and then identities inside them, because a one-level
interval is then too short.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Bool, Float32, Int, Num

from fedemb.errors import InputError


@dataclass(frozen=True)
class Estimate:
    """A number with a 95 % interval.

    Attributes:
      value: the estimate from all the data.
      draws: the estimate in each bootstrap draw, [samples]; empty if nothing could be drawn.
    """

    value: float
    draws: np.ndarray = field(repr=False)

    @property
    def low(self) -> float:
        """Returns the 2.5 % quantile of the draws."""
        return float(np.quantile(self.draws, 0.025)) if self.draws.size else float("nan")

    @property
    def high(self) -> float:
        """Returns the 97.5 % quantile of the draws."""
        return float(np.quantile(self.draws, 0.975)) if self.draws.size else float("nan")

    def __str__(self) -> str:
        """Returns the estimate and its interval as text."""
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"

    def __sub__(self, other: Estimate) -> Estimate:
        """Returns the paired difference; both must come from the same draws of the same identities.

        Raises:
          InputError: the numbers of draws differ.
        """
        if self.draws.shape != other.draws.shape:
            raise InputError(
                f"a paired difference needs equally many draws, got {self.draws.size} and "
                f"{other.draws.size}; evaluate both on the same identities"
            )
        return Estimate(self.value - other.value, self.draws - other.draws)

    def to_json(self) -> dict[str, float]:
        """Returns the value and interval, rounded to six decimal places."""
        return {
            "value": round(self.value, 6),
            "low": round(self.low, 6),
            "high": round(self.high, 6),
        }


def draw_weights(
    units: int, samples: int, seed: int, groups: Int[np.ndarray, " units"] | None = None
) -> Float32[np.ndarray, "samples units"]:
    """Returns how often each unit is drawn, float32 [samples, units].

    Args:
      units: number of units.
      samples: number of draws.
      seed: seed of the draws.
      groups: dense group IDs; whole groups are drawn with replacement, and inside each group as
        many units as it has. None: only units are drawn, and each row sums to `units`.
    """
    random = np.random.default_rng(np.random.SeedSequence([seed, units, samples]))
    if groups is None:
        return random.multinomial(units, np.full(units, 1 / units), size=samples).astype(np.float32)
    sizes = np.bincount(groups)
    taken = random.multinomial(len(sizes), np.full(len(sizes), 1 / len(sizes)), size=samples)
    weights = np.zeros((samples, units), np.float32)
    for group, size in enumerate(sizes):
        weights[:, groups == group] = random.multinomial(
            taken[:, group] * size, np.full(size, 1 / size)
        )
    return weights


def weighted_mean(
    values: Num[np.ndarray, " n"] | Bool[np.ndarray, " n"],
    units: Int[np.ndarray, " n"],
    weights: Float32[np.ndarray, "samples units"],
    use: Bool[np.ndarray, " n"] | None = None,
) -> Estimate:
    """Returns the mean of `values` over the rows in `use`, with the rows' units resampled.

    Args:
      values: [n].
      units: dense ids [n].
      weights: [samples, units] from `draw_weights`.
      use: bool [n]; None uses all.

    Raises:
      InputError: no row is used.
    """
    use = np.ones(len(values), bool) if use is None else use
    if not use.any():
        raise InputError("there is nothing to average; take more images per identity")
    count = weights.shape[1]
    sums = np.bincount(units[use], values[use], minlength=count)
    sizes = np.bincount(units[use], minlength=count)
    totals = weights @ sizes
    draws = (weights @ sums)[totals > 0] / totals[totals > 0]
    if draws.size < len(weights):  # keep draws paired: a draw without data repeats the value
        filled = np.full(len(weights), values[use].mean())
        filled[totals > 0] = draws
        draws = filled
    return Estimate(float(values[use].mean()), draws)
