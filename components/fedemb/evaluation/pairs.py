"""Counts over all pairs of embeddings, streamed in tiles: memory does not grow with the pairs.

A cosine is rounded to a multiple of 2**-26 (finer than the error of a float32 dot product), so that
equal scores are equal everywhere and a pair belongs to exactly one bin. Two passes select the
threshold of a false accept rate exactly. The first pass counts negative pairs in about 500 bins.
The second pass counts every grid value inside the bins that contain a threshold. Both passes count
in detail only pairs above a cut, which is estimated from a subset and verified by the counts.

Bootstrap over identities: an estimate keeps its draws, so that differences can be paired.

Each draw samples all identities with replacement. The same seed and number of identities give the
same draws for every metric. If identities come in groups (alphabets, tracks, stores) and new groups
may differ, a draw samples groups first and then identities inside them, because a one-level
interval is then too short.
"""

# SciPy ships no types.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Bool, Float, Float32, Int, Num
from scipy import special

from fedemb.errors import InputError
from fedemb.foundation.cores import on_all_cores


@dataclass(frozen=True)
class Estimate:
    """A number with a 95 % interval.

    Attributes:
      value: the estimate from all the data.
      draws: the estimate in each bootstrap draw, [samples]; empty if nothing could be drawn.
      units: number of what is resampled.
      share: whether it is a share, in [0, 1].
    """

    value: float
    draws: np.ndarray = field(repr=False)
    units: int
    share: bool = True

    @property
    def interval(self) -> tuple[float, float]:
        """Returns the interval by Student's t over units, for a share on the scale of log odds.

        Quantiles of the draws are too narrow for few units: with 10, they cover 84 to 86 %. A share
        of 0 or 1 has the exact interval of as many equal units.
        """
        if not self.draws.size:
            return math.nan, math.nan
        value, units = self.value, max(2, self.units)
        spread = float(self.draws.std()) * math.sqrt(units / (units - 1))
        reach = float(special.stdtrit(units - 1, 0.975)) * spread
        if not self.share:
            return value - reach, value + reach
        if not 0 < value < 1:
            alike = 0.025 ** (1 / units)
            return (alike, 1.0) if value else (0.0, 1 - alike)
        odds, reach = special.logit(value), reach / (value * (1 - value))
        return float(special.expit(odds - reach)), float(special.expit(odds + reach))

    @property
    def low(self) -> float:
        """Returns the lower end of the interval."""
        return self.interval[0]

    @property
    def high(self) -> float:
        """Returns the upper end of the interval."""
        return self.interval[1]

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
        units = min(self.units, other.units)
        return Estimate(self.value - other.value, self.draws - other.draws, units, share=False)

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
    share = bool(((values >= 0) & (values <= 1)).all())
    return Estimate(float(values[use].mean()), draws, int((sizes > 0).sum()), share)


GRID = 2**26
"""Grid values per unit of cosine."""
MAX_TILE = 2048
MAX_BINS = 512
MAX_UNITS = 10_000
"""Maximum number of bootstrap units; more clusters are merged into this number of groups."""
_MOST_KEPT = 1 << 26
"""Maximum number of scores above the cut that are kept in memory; more are computed twice."""
_NO_PAIR = np.float32(-2.0)


@dataclass(frozen=True)
class Labelled:
    """Embeddings sorted so that a unit, and in it a label, is contiguous.

    Attributes:
      queries: float32 [n, dim], unit norm.
      gallery: the other side of each pair, [n, dim]; the same array if only one model is compared.
      labels: dense label ids [n], not decreasing.
      units: dense ids [n] of what the bootstrap resamples, not decreasing; a label is in one unit.
      order: [n] positions of the rows in the caller's arrays.
      groups: dense ids [units] of the groups that the bootstrap draws first; None: units alone.
    """

    queries: np.ndarray
    gallery: np.ndarray
    labels: np.ndarray
    units: np.ndarray
    order: np.ndarray
    groups: np.ndarray | None = None

    @property
    def resampled(self) -> int:
        """Returns the number of groups, or of units without groups."""
        return int((self.units if self.groups is None else self.groups).max()) + 1

    def weights(self, samples: int, seed: int) -> Float32[np.ndarray, "samples units"]:
        """Returns how often the bootstrap draws each unit; see `draw_weights`."""
        return draw_weights(int(self.units[-1]) + 1, samples, seed, self.groups)

    @property
    def symmetric(self) -> bool:
        """Returns whether each unordered pair counts once, instead of each ordered pair."""
        return self.gallery is self.queries

    @property
    def label_sizes(self) -> np.ndarray:
        """Returns the number of images per label, [labels]."""
        return np.bincount(self.labels)


@dataclass(frozen=True)
class PairCounts:
    """Counts over all pairs that the metrics use.

    Attributes:
      thresholds: grid value per false accept rate [rates]; accept a pair above it.
      accepted: positive pairs above each threshold [rates].
      negatives: number of negative pairs.
      positives: number of positive pairs.
      edges: scores at the edges of the bins, ascending [bins + 1].
      touching_bins: negative pairs that involve a unit, per bin [units, bins]; a pair counts for
        both of its units.
      touching: the same over all bins and below them [units].
      positive_bins: positive pairs of a unit [units, 1 + bins]; the first bin is all below.
    """

    thresholds: np.ndarray
    accepted: np.ndarray
    negatives: int
    positives: int
    edges: np.ndarray
    touching_bins: np.ndarray
    touching: np.ndarray
    positive_bins: np.ndarray


def grid_keys(scores: Float[np.ndarray, "*tile"]) -> Int[np.ndarray, "*tile"]:
    """Returns cosines rounded to the grid: int32, clipped to [-1, 1]."""
    return np.clip(np.rint(scores * np.float32(GRID)), -GRID, GRID).astype(np.int32)


Place = tuple[slice, slice]
"""Rows and columns of a tile."""


def _places(data: Labelled) -> Iterator[Place]:
    """Yields rows and columns of the tiles that cover all pairs."""
    count = len(data.labels)
    for i in range(0, count, MAX_TILE):
        for j in range(i if data.symmetric else 0, count, MAX_TILE):
            yield slice(i, min(i + MAX_TILE, count)), slice(j, min(j + MAX_TILE, count))


def _negatives(data: Labelled, place: Place) -> np.ndarray:
    """Returns the scores of a tile, [rows, columns]; other than negative pairs score below -1."""
    rows, columns = place
    scores = data.queries[rows] @ data.gallery[columns].T
    left, right = data.labels[rows], data.labels[columns]
    if right[0] <= left[-1] and left[0] <= right[-1]:
        scores[left[:, None] == right] = _NO_PAIR
    if data.symmetric and rows == columns:
        scores[np.tril_indices(len(scores))] = _NO_PAIR
    return scores


def negative_tiles(data: Labelled) -> Iterator[tuple[slice, slice, np.ndarray]]:
    """Yields (rows, columns, scores [rows, columns]) over all negative pairs, by `_negatives`."""
    for rows, columns in _places(data):
        yield rows, columns, _negatives(data, (rows, columns))


def positive_blocks(data: Labelled) -> Iterator[tuple[int, np.ndarray]]:
    """Yields (unit, scores [pairs]) over all positive pairs, label by label."""
    stops = np.cumsum(data.label_sizes)
    for start, stop in zip(stops - data.label_sizes, stops, strict=True):
        unit = int(data.units[start])
        for i in range(start, stop, MAX_TILE):
            rows = slice(i, min(i + MAX_TILE, stop))
            for j in range(i if data.symmetric else start, stop, MAX_TILE):
                columns = slice(j, min(j + MAX_TILE, stop))
                scores = data.queries[rows] @ data.gallery[columns].T
                if i == j:
                    keep = np.triu_indices(len(scores), 1)
                    upper = scores[keep]
                    scores = upper if data.symmetric else np.append(upper, scores.T[keep])
                yield unit, scores.ravel()


def _estimate_cut(data: Labelled, far: float) -> int:
    """Returns a grid value safely below the threshold of `far`; -GRID - 1 selects all pairs."""
    step = max(1, len(data.labels) // 1500)
    labels = data.labels[::step]
    scores = data.queries[::step] @ data.gallery[::step].T
    negatives = scores[labels[:, None] != labels]
    wanted = 1.3 * far + 50 / max(len(negatives), 1)
    if wanted >= 0.9 or len(negatives) < 1000:
        return -GRID - 1
    return int(grid_keys(np.quantile(negatives, [1 - wanted]))[0])


def _candidates(tile: np.ndarray, cut: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns flat positions and grid values of the scores above a cut."""
    flat = tile.ravel()
    positions = np.flatnonzero(flat > np.float32(cut / GRID if cut >= -GRID else -1.5))
    return positions, grid_keys(flat[positions])


def _first_pass(
    data: Labelled, cut: int, shift: int
) -> tuple[np.ndarray, Iterable[np.ndarray] | None]:
    """Returns negative pairs per unit and bin of 2**shift grid values above the cut.

    Also returns the grid values above the cut, or None if there are more than `_MOST_KEPT`.
    """
    bins = ((GRID - cut) >> shift) + 1

    def counted(place: Place) -> tuple[np.ndarray, list[tuple[slice, np.ndarray]]]:
        tile = _negatives(data, place)
        positions, keys = _candidates(tile, cut)
        bin_of, found = (keys - cut) >> shift, []
        for span, index in zip(place, np.divmod(positions, tile.shape[1]), strict=True):
            units = data.units[span]
            low, high = units[0], units[-1] + 1
            flat = (units - low)[index] * bins + bin_of
            counts = np.bincount(flat, minlength=(high - low) * bins)
            found.append((slice(low, high), counts.reshape(high - low, bins)))
        return keys, found

    kept: list[np.ndarray] = []
    total = 0
    touching = np.zeros((data.units[-1] + 1, bins), np.int64)
    for keys, found in on_all_cores(counted, _places(data)):
        total += len(keys)
        if total <= _MOST_KEPT:
            kept.append(keys)
        for units, counts in found:
            touching[units] += counts
    return touching, kept if total <= _MOST_KEPT else None


def _second_pass(
    data: Labelled, kept: Iterable[np.ndarray] | None, targets: Sequence[int], cut: int, shift: int
) -> np.ndarray:
    """Returns negative pairs per grid value inside each target bin, [targets, 2**shift]."""
    fine = np.zeros((len(targets), 1 << shift), np.int64)
    lowest = cut + (min(targets) << shift) - 64  # float32 cannot separate grid neighbours
    if kept is None:
        kept = (_candidates(tile, max(lowest, cut))[1] for _, _, tile in negative_tiles(data))
    for keys in kept:
        bin_of = (keys - cut) >> shift
        for row, target in enumerate(targets):
            inside = keys[bin_of == target] - (cut + (target << shift))
            fine[row] += np.bincount(inside, minlength=1 << shift)
    return fine


def count_pairs(data: Labelled, false_accept_rates: Sequence[float]) -> PairCounts:
    """Counts all pairs and selects the threshold of each false accept rate exactly.

    The threshold is the (floor(rate * negatives) + 1)-th largest negative score
    (docs/explanation/method.md#metric).

    Args:
      data: embeddings and labels; at least one negative pair.
      false_accept_rates: each in (0, 1).
    """
    sizes = data.label_sizes
    per_image = len(data.labels) - sizes[data.labels]
    sides = 1 if data.symmetric else 2
    touching = sides * np.bincount(data.units, per_image).astype(np.int64)
    negatives = int(touching.sum()) // 2
    ranks = np.array([min(int(far * negatives), negatives - 1) for far in false_accept_rates])
    cut = _estimate_cut(data, max(false_accept_rates))
    while True:
        shift = max(0, ((GRID - cut) // MAX_BINS).bit_length())
        bins, kept = _first_pass(data, cut, shift)
        above = np.cumsum(bins.sum(0)[::-1])[::-1] // 2
        complete = above[1] if len(above) > 1 else 0  # one bin: a collapsed model, all at cosine 1
        if cut < -GRID or complete > ranks.max():
            break  # the lowest bin may be incomplete, so it must hold no threshold
        cut = -GRID - 1
    targets = [int(np.flatnonzero(above > rank)[-1]) for rank in ranks]
    fine = _second_pass(data, kept, targets, cut, shift)
    thresholds = np.empty(len(ranks), np.int64)
    for row, (rank, target) in enumerate(zip(ranks, targets, strict=True)):
        higher = above[target + 1] if target + 1 < len(above) else 0
        tail = higher + np.cumsum(fine[row][::-1])[::-1]
        inside = np.flatnonzero(tail > rank)
        if not inside.size:  # BLAS gave the two passes different last bits
            inside = np.flatnonzero(fine[row])[:1]
        thresholds[row] = cut + (target << shift) + inside[-1]
    positive_bins = np.zeros((len(bins), bins.shape[1] + 1), np.int64)
    accepted = np.zeros(len(ranks), np.int64)
    for unit, scores in positive_blocks(data):
        keys = grid_keys(scores)
        bin_of = np.maximum((keys - cut) >> shift, -1) + 1
        positive_bins[unit] += np.bincount(bin_of, minlength=positive_bins.shape[1])
        accepted += (keys[:, None] > thresholds).sum(0)
    edges = (cut + (np.arange(bins.shape[1] + 1, dtype=np.int64) << shift)) / GRID
    return PairCounts(
        thresholds=thresholds,
        accepted=accepted,
        negatives=negatives,
        positives=int(positive_bins.sum()),
        edges=edges,
        touching_bins=bins,
        touching=touching,
        positive_bins=positive_bins,
    )
