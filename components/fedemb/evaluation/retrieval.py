"""Retrieval by embeddings: every image is a query against all others, with intervals.

Ties count against the model, so a collapsed backbone retrieves nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedemb.evaluation.bootstrap import Estimate, weighted_mean
from fedemb.evaluation.pairs import Labelled


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
    1.000 [1.000, 1.000]

    Args:
      data: result of `arrange`.
      ks: depths of recall@k.
      samples: number of bootstrap draws.
      seed: seed of the draws.
      max_queries: maximum number of queries.
      block: number of queries at once; None: as many as keep their scores within 64 MB, at most
        512.

    Raises:
      InputError: no query has a match.
    """
    count = len(data.labels)
    block = block or max(1, min(512, 2**24 // count))
    asked = np.unique(np.linspace(0, count - 1, min(count, max_queries)).astype(np.int64))
    first, precision = _ranked(data, asked, block)
    units = data.units[asked]
    weights = data.weights(samples, seed)
    has_match = data.label_sizes[data.labels[asked]] > 1

    def share(values: np.ndarray) -> Estimate:
        return weighted_mean(values.astype(np.float64), units, weights, has_match)

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
    first = np.full(len(asked), len(data.labels), np.int64)
    precision = np.zeros(len(asked))
    for begin in range(0, len(asked), block):
        rows = asked[begin : begin + block]
        scores = data.queries[rows] @ data.gallery.T
        scores[np.arange(len(rows)), rows] = -2  # the query itself
        for i, label in enumerate(data.labels[rows], start=begin):
            span = slice(starts[label], stops[label])
            match = np.sort(scores[i - begin, span])[:0:-1]
            if match.size:
                others = scores[i - begin]
                others[span] = -2
                ranks = _not_below(others, match) + np.arange(1, match.size + 1)
                first[i] = ranks[0]
                precision[i] = (np.arange(1, match.size + 1) / ranks).mean()
    return first, precision
