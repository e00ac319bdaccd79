"""Verification by embeddings, exact over all pairs, with intervals over identities.

The metric is defined in docs/explanation/method.md#metric: recall of same-class pairs at the
threshold that accepts a given share of different-class pairs.

Retrieval by embeddings: every image is a query against all others, with intervals.

Ties count against the model, so a collapsed backbone retrieves nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from jaxtyping import Float32, Num

from fedemb.errors import Diverged, InputError
from fedemb.evaluation.pairs import (
    GRID,
    MAX_UNITS,
    Estimate,
    Labelled,
    PairCounts,
    count_pairs,
    grid_keys,
    negative_tiles,
    positive_blocks,
    weighted_mean,
)
from fedemb.foundation.cores import on_all_cores

EXACT_PAIRS = 300_000
"""Maximum number of pairs for exact draws; above it, draws are first order in the weights."""


@dataclass(frozen=True)
class Verification:
    """Result of `verify`.

    Attributes:
      recall: per false accept rate, in the order requested.
      thresholds: cosine above which a pair is accepted, per rate.
      negatives: number of different-class pairs.
      positives: number of same-class pairs.
      roc: float64 [points, 3] of (false accept rate, recall, threshold), rates ascending.
    """

    false_accept_rates: tuple[float, ...]
    recall: tuple[Estimate, ...]
    thresholds: tuple[float, ...]
    negatives: int
    positives: int
    roc: np.ndarray = field(repr=False)


def require_finite(outputs: np.ndarray) -> None:
    """Refuses the outputs of a model that diverged.

    Raises:
      Diverged: the outputs contain NaN or infinity.
    """
    if not np.isfinite(outputs).all():
        raise Diverged(
            "numbers that the model gives are not finite: it diverged; its budget is spent, lower "
            "the learning rates of the next run"
        )


def unit_norm(embeddings: np.ndarray) -> Float32[np.ndarray, "n dim"]:
    """Returns rows scaled to unit length, float32 [n, dim]; rows of zeros are unchanged.

    Raises:
      InputError: the input is not a matrix.
      Diverged: the input contains NaN or infinity.
    """
    embeddings = np.asarray(embeddings, np.float32)
    if embeddings.ndim != 2:
        raise InputError(
            f"embeddings must have the shape [images, dimensions], got {embeddings.shape}; pass "
            "one row per image"
        )
    require_finite(embeddings)
    norms = np.linalg.norm(embeddings.astype(np.float64), axis=1, keepdims=True)
    return (embeddings / np.maximum(norms, 1e-12)).astype(np.float32)


def _numbered_groups(groups: np.ndarray, clusters: np.ndarray) -> np.ndarray:
    """Returns the number of the group of each image; raises InputError as `arrange` says."""
    numbers = np.unique(groups, return_inverse=True)[1]
    pairs = np.unique(np.stack([numbers, clusters]), axis=1)
    if pairs.shape[1] != len(np.unique(clusters)):
        raise InputError(
            "an identity is in more than one group; pass no groups, or one group per identity"
        )
    if pairs.shape[1] > MAX_UNITS:
        raise InputError(
            f"intervals over groups support at most {MAX_UNITS:,} identities, got "
            f"{pairs.shape[1]:,}; lower evaluation.max_images"
        )
    return numbers


def arrange(
    embeddings: np.ndarray,
    labels: np.ndarray,
    clusters: np.ndarray | None = None,
    gallery: np.ndarray | None = None,
    groups: np.ndarray | None = None,
) -> Labelled:
    """Normalises and sorts embeddings for the functions of this module.

    Args:
      embeddings: [n, dim].
      labels: class IDs [n].
      clusters: IDs [n] of the clusters that the bootstrap resamples; None: the classes. A class
        must be in one cluster.
      gallery: [n, dim] embeddings of the same images by another model, for `previous_release`.
      groups: names [n] of the groups that the bootstrap draws before clusters; None: no groups. A
        cluster must be in one group.

    Raises:
      InputError: lengths differ, values are not finite, a class is in two clusters, or a cluster is
        in two groups.
    """
    labels = np.asarray(labels)
    clusters = labels if clusters is None else np.asarray(clusters)
    if not len(embeddings) == len(labels) == len(clusters):
        raise InputError(
            f"got {len(embeddings)} embeddings, {len(labels)} labels and {len(clusters)} clusters;"
            " give one of each per image"
        )
    dense_clusters = np.unique(clusters, return_inverse=True)[1]
    group_of = None if groups is None else _numbered_groups(groups, dense_clusters)
    order = np.lexsort((labels, dense_clusters))
    units = dense_clusters[order]
    begins = np.diff(labels[order], prepend=0) != 0
    begins |= np.diff(units, prepend=-1) != 0
    if begins.sum() != len(np.unique(labels)):
        raise InputError(
            "a class is in more than one cluster; use clusters that contain whole classes"
        )
    if len(units) and units[-1] >= MAX_UNITS:
        units = units * MAX_UNITS // (units[-1] + 1)
    queries = unit_norm(embeddings)[order]
    return Labelled(
        queries=queries,
        gallery=queries if gallery is None else unit_norm(gallery)[order],
        labels=np.cumsum(begins) - 1,
        units=units,
        order=order,
        groups=None if group_of is None else group_of[order][np.diff(units, prepend=-1) != 0],
    )


def verify(
    data: Labelled, false_accept_rates: Sequence[float], *, samples: int, seed: int = 0
) -> Verification:
    """Returns recall at false accept rates over all pairs, with intervals over identities.

    The threshold is the (floor(rate * negatives) + 1)-th largest negative score and a pair is
    accepted above it; each draw has its own threshold. 100,000 embeddings take minutes and little
    memory.

    Args:
      data: result of `arrange`.
      false_accept_rates: each in (0, 1).
      samples: number of bootstrap draws.
      seed: seed of the draws.

    Raises:
      InputError: no positive pair or no negative pair exists.
    """
    sizes = data.label_sizes
    if len(sizes) < 2 or sizes.max(initial=0) < 2:
        raise InputError(
            f"verification needs two classes, one of them with two images, got {len(sizes)} "
            f"classes with at most {sizes.max(initial=0)} images; increase "
            "partition.evaluation.fraction"
        )
    counts = count_pairs(data, false_accept_rates)
    weights = data.weights(samples, seed)
    values = counts.accepted / counts.positives
    if data.symmetric and counts.negatives + counts.positives <= EXACT_PAIRS:
        draws = _exact_draws(data, counts, false_accept_rates, weights)
    else:
        one = _binned_recall(counts, false_accept_rates, np.ones_like(weights[:1]))
        draws = _binned_recall(counts, false_accept_rates, weights) - one + values
    negatives = np.cumsum(counts.touching_bins.sum(0)[::-1]) / 2
    positives = np.cumsum(counts.positive_bins.sum(0)[:0:-1])
    roc = np.stack(
        [negatives / counts.negatives, positives / counts.positives, counts.edges[-2::-1]], axis=1
    )
    return Verification(
        false_accept_rates=tuple(false_accept_rates),
        recall=tuple(
            Estimate(float(value), np.clip(draws[:, i], 0, 1), data.resampled)
            for i, value in enumerate(values)
        ),
        thresholds=tuple(float(key) / GRID for key in counts.thresholds),
        negatives=counts.negatives,
        positives=counts.positives,
        roc=roc[np.append(True, np.diff(roc[:, 0]) > 0) & (roc[:, 0] > 0)],
    )


def recall(
    embeddings: Num[np.ndarray, "n dim"],
    labels: np.ndarray,
    false_accept_rate: float,
    *,
    samples: int = 200,
) -> Estimate:
    """Returns the recall of same-class pairs at one false accept rate; see `verify`.

    >>> two_people = np.array([[1, 0], [1, 0.1], [0, 1], [0.1, 1]])
    >>> print(recall(two_people, np.array([0, 0, 1, 1]), 0.1))
    1.000 [0.158, 1.000]

    Args:
      embeddings: [n, dim], of any length.
      labels: class ids [n].
      false_accept_rate: in (0, 1).
      samples: bootstrap draws over classes.

    Raises:
      InputError: no same-class pair or no different-class pair exists.
    """
    return verify(arrange(embeddings, labels), (false_accept_rate,), samples=samples).recall[0]


def _binned_recall(
    counts: PairCounts, false_accept_rates: Sequence[float], weights: np.ndarray
) -> np.ndarray:
    """Returns recall per draw and rate, [draws, rates], linear inside a bin.

    A pair of units a, b has weight w_a w_b = 1 + (w_a - 1) + (w_b - 1) + ...; the product of the
    deviations is omitted (Hajek projection). Its share falls with the number of identities.
    """
    touching = counts.touching_bins[:, ::-1].astype(np.float32)
    deviations = weights - 1
    accepts = touching.sum(0, dtype=np.float64) / 2 + deviations @ touching
    accepts = np.maximum.accumulate(np.cumsum(accepts, axis=1), axis=1)
    totals = counts.negatives + deviations @ counts.touching.astype(np.float32)
    positives = weights @ counts.positive_bins.astype(np.float32)
    recalled = np.cumsum(positives[:, :0:-1], axis=1, dtype=np.float64)
    possible = np.maximum(positives.sum(1), 1)
    result = np.empty((len(weights), len(false_accept_rates)))
    for row, (accept, recall) in enumerate(zip(accepts, recalled, strict=True)):
        wanted = np.array(false_accept_rates) * max(totals[row], 1)
        result[row] = np.interp(wanted, np.append(0, accept), np.append(0, recall)) / possible[row]
    return result


def _exact_draws(
    data: Labelled, counts: PairCounts, false_accept_rates: Sequence[float], weights: np.ndarray
) -> np.ndarray:
    """Returns recall per draw and rate, [draws, rates], exact on the drawn multiset of pairs.

    The weight of a pair inside a unit is the unit's weight. The weight of a pair across units is
    the product of both weights. An image is never paired with its own copy.
    """
    keys, left, right = [], [], []
    for rows, columns, tile in negative_tiles(data):
        where = np.nonzero(tile >= -1.5)
        keys.append(grid_keys(tile[where]))
        left.append(data.units[rows][where[0]])
        right.append(data.units[columns][where[1]])
    negative = np.concatenate(keys)
    order = np.argsort(negative)[::-1]
    negative, a, b = negative[order], np.concatenate(left)[order], np.concatenate(right)[order]
    blocks = [(np.full(len(scores), unit), scores) for unit, scores in positive_blocks(data)]
    owner = np.concatenate([block[0] for block in blocks])
    positive = grid_keys(np.concatenate([block[1] for block in blocks]))
    result = np.empty((len(weights), len(false_accept_rates)))
    for row, weight in enumerate(weights.astype(np.int64)):
        running = np.cumsum(np.where(a == b, weight[a], weight[a] * weight[b]))
        drawn = weight[owner]
        for column, far in enumerate(false_accept_rates):
            if not running[-1] or not drawn.sum():
                result[row, column] = counts.accepted[column] / counts.positives
                continue
            place = np.searchsorted(running, int(far * running[-1]) + 1)
            accepted = positive > negative[min(place, len(negative) - 1)]
            result[row, column] = drawn[accepted].sum() / drawn.sum()
    return result


def rates_at(
    data: Labelled, threshold: float, *, samples: int, seed: int = 0
) -> tuple[Estimate | None, Estimate | None]:
    """Returns false accept rate and recall at a given threshold, as in operation on a subgroup.

    Args:
      data: result of `arrange` for the images of one subgroup.
      threshold: cosine above which a pair is accepted.
      samples: number of bootstrap draws.
      seed: seed of the draws.

    Returns:
      (false accept rate, recall); None for a rate without pairs.
    """
    key = round(threshold * GRID)
    units = int(data.units[-1]) + 1
    weights = data.weights(samples, seed)
    touching, above = np.zeros(units), np.zeros(units)
    for rows, columns, tile in negative_tiles(data):
        for span, axis in ((rows, 1), (columns, 0)):
            real = (tile >= -1.5).sum(axis)
            accepted = (np.where(tile >= -1.5, grid_keys(tile), -GRID - 1) > key).sum(axis)
            touching += np.bincount(data.units[span], real, minlength=units)
            above += np.bincount(data.units[span], accepted, minlength=units)
    false_accepts = None
    if touching.sum():
        drawn = touching.sum() / 2 + (weights - 1) @ touching
        taken = above.sum() / 2 + (weights - 1) @ above
        rates = np.clip(taken / np.maximum(drawn, 1), 0, 1)
        false_accepts = Estimate(float(above.sum() / touching.sum()), rates, data.resampled)
    owners, hits = [], []
    for unit, scores in positive_blocks(data):
        owners.append(np.full(len(scores), unit))
        hits.append(grid_keys(scores) > key)
    owner, hit = np.concatenate(owners), np.concatenate(hits).astype(np.float64)
    if not len(hit):
        return false_accepts, None
    return false_accepts, replace(weighted_mean(hit, owner, weights), units=data.resampled)


@dataclass(frozen=True)
class Retrieval:
    """Result of `retrieve`.

    Attributes:
      recall_at: per k, share of queries with a match among the k nearest, of all queries that have
        a match.
      mean_average_precision: mean average precision of the same queries.
      nearest_neighbour: leave-one-out 1-NN accuracy of the same queries.
      queries: number of queries, those without a match included.
      identities_with_match: number of identities that have a query with a match.
    """

    recall_at: dict[int, Estimate]
    mean_average_precision: Estimate
    nearest_neighbour: Estimate
    queries: int
    identities_with_match: int


def _not_below(others: np.ndarray, match: np.ndarray) -> np.ndarray:
    """Returns how many of `others` are at least each of `match`; may sort `others` in place."""
    if match.size <= 24:
        return np.array([np.count_nonzero(others >= score) for score in match])
    others.sort()
    return len(others) - np.searchsorted(others, match)


def retrieve(
    data: Labelled,
    ks: Sequence[int],
    *,
    samples: int,
    seed: int = 0,
    max_queries: int = 20_000,
    block: int | None = None,
) -> Retrieval:
    """Ranks all other images for every query. Ties count against the model.

    The draws resample the queries' identities; the gallery is fixed. Above `max_queries` images, an
    evenly spaced subset is used as queries, always against the whole gallery.

    >>> from fedemb.evaluation.metrics import arrange
    >>> two_people = np.array([[1, 0], [1, 0.1], [0, 1], [0.1, 1]])
    >>> found = retrieve(arrange(two_people, np.array([0, 0, 1, 1])), ks=[1], samples=20)
    >>> print(found.nearest_neighbour)
    1.000 [0.158, 1.000]

    Args:
      data: result of `arrange`.
      ks: depths of recall@k.
      samples: number of bootstrap draws.
      seed: seed of the draws.
      max_queries: maximum number of queries.
      block: number of queries of a core at once; None: as many as keep their scores within 32 MB,
        at most 512.

    Raises:
      InputError: no query has a match.
    """
    count = len(data.labels)
    block = block or max(1, min(512, 2**23 // count))
    asked = np.unique(np.linspace(0, count - 1, min(count, max_queries)).astype(np.int64))
    first, precision = _ranked(data, asked, block)
    units = data.units[asked]
    weights = data.weights(samples, seed)
    has_match = data.label_sizes[data.labels[asked]] > 1

    def share(values: np.ndarray) -> Estimate:
        found = weighted_mean(values.astype(np.float64), units, weights, has_match)
        return replace(found, units=data.resampled)

    return Retrieval(
        recall_at={k: share(first <= k) for k in ks},
        mean_average_precision=share(precision),
        nearest_neighbour=share(first <= 1),
        queries=len(asked),
        identities_with_match=len(np.unique(units[has_match])),
    )


def _ranked(data: Labelled, asked: np.ndarray, block: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the rank of the first match and the average precision of each query."""
    stops = np.cumsum(data.label_sizes)
    starts = stops - data.label_sizes

    def ranked(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        first, precision = np.full(len(rows), len(data.labels), np.int64), np.zeros(len(rows))
        scores = data.queries[rows] @ data.gallery.T
        scores[np.arange(len(rows)), rows] = -2  # the query itself
        for i, label in enumerate(data.labels[rows]):
            span = slice(starts[label], stops[label])
            match = np.sort(scores[i, span])[:0:-1]
            if match.size:
                others = scores[i]
                others[span] = -2
                ranks = _not_below(others, match) + np.arange(1, match.size + 1)
                first[i] = ranks[0]
                precision[i] = (np.arange(1, match.size + 1) / ranks).mean()
        return first, precision

    blocks = np.split(asked, range(block, len(asked), block))
    first, precision = zip(*on_all_cores(ranked, blocks), strict=True)
    return np.concatenate(first), np.concatenate(precision)
