"""Metrics of one model as JSON, paired differences and subgroups. numpy only."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedemb.config import EvaluationConfig
from fedemb.documents.utility import rate_name
from fedemb.errors import InputError
from fedemb.evaluation.bootstrap import Estimate
from fedemb.evaluation.held_out import Subjects, shown_group
from fedemb.evaluation.metrics import Verification, arrange, rates_at, verify
from fedemb.evaluation.retrieval import Retrieval, retrieve
from fedemb.foundation.canonical_json import JsonFields

MIN_SUBGROUP_IDENTITIES = 10
"""Minimum identities of a measured subgroup; smaller ones are only counted."""
ROC_POINTS = 120
_SEED = 20221121
"""Seed of the bootstrap: fixed, so that two reports on the same identities can be paired."""


@dataclass(frozen=True)
class Measured:
    """Measurements of one model on one set of subjects."""

    verification: Verification
    retrieval: Retrieval

    @property
    def headline(self) -> Estimate:
        """Returns the recall at the first false accept rate."""
        return self.verification.recall[0]

    def to_json(self) -> JsonFields:
        """Returns `recall_at_far` and `retrieval` of the utility report."""
        verification, retrieval = self.verification, self.retrieval
        return {
            "recall_at_far": {
                rate_name(rate): {**recall.to_json(), "threshold": round(threshold, 6)}
                for rate, recall, threshold in zip(
                    verification.false_accept_rates,
                    verification.recall,
                    verification.thresholds,
                    strict=True,
                )
            },
            "retrieval": {
                "recall_at": {str(k): e.to_json() for k, e in retrieval.recall_at.items()},
                "mean_average_precision": retrieval.mean_average_precision.to_json(),
                "nearest_neighbour": retrieval.nearest_neighbour.to_json(),
                "queries": retrieval.queries,
                "identities_with_match": retrieval.identities_with_match,
            },
        }


def measure(
    subjects: Subjects,
    embeddings: np.ndarray,
    config: EvaluationConfig,
    gallery: np.ndarray | None = None,
) -> Measured:
    """Measures embeddings; with `gallery`, queries of one model against a gallery of another.

    Args:
      subjects: subjects of the embeddings.
      embeddings: [n, dim].
      config: rates, depths and number of draws.
      gallery: [n, dim] of the same images.

    Raises:
      InputError: the subjects are not measurable.
      Diverged: an embedding is not finite.
    """
    groups = subjects.groups if config.resample_subgroups else None
    data = arrange(embeddings, subjects.labels, subjects.clusters, gallery, groups)
    draws = {"samples": config.bootstrap_samples, "seed": _SEED}
    return Measured(
        verify(data, config.false_accept_rates, **draws),
        retrieve(data, config.recall_at, **draws),
    )


def differences(better: Measured, than: Measured) -> JsonFields:
    """Returns paired differences of recall per false accept rate."""
    rates = better.verification.false_accept_rates
    pairs = zip(rates, better.verification.recall, than.verification.recall, strict=True)
    return {rate_name(rate): (a - b).to_json() for rate, a, b in pairs}


def roc_points(verification: Verification) -> dict[str, list[float]]:
    """Returns a ROC as one list per axis, for KFP, thinned evenly in log false accept rate."""
    roc = verification.roc
    wanted = np.linspace(np.log(roc[0, 0]), np.log(roc[-1, 0]), ROC_POINTS)
    rows = roc[np.unique(np.searchsorted(np.log(roc[:, 0]), wanted).clip(0, len(roc) - 1))]
    return {
        name: [round(float(value), 8) for value in rows[:, column]]
        for column, name in enumerate(("far", "recall", "threshold"))
    }


def by_subgroup(
    subjects: Subjects, embeddings: np.ndarray, config: EvaluationConfig, threshold: float
) -> JsonFields:
    """Evaluates `embeddings` [n, dim] of every subgroup at its own threshold and a common one.

    Returns:
      `measured`: a mapping per subgroup, worst recall first; `too_small`: the number of skipped
      ones.
    """
    measured: list[tuple[float, JsonFields]] = []
    too_small = 0
    for name in np.unique(subjects.subgroups):
        use = subjects.subgroups == name
        part = subjects.take(use)
        if not part.measurable or len(np.unique(part.clusters)) < MIN_SUBGROUP_IDENTITIES:
            too_small += 1
            continue
        try:
            data = arrange(embeddings[use], part.labels, part.clusters)
        except InputError:
            too_small += 1
            continue
        draws = {"samples": config.bootstrap_samples, "seed": _SEED}
        own = verify(data, config.false_accept_rates[:1], **draws)
        accepts, recall = rates_at(data, threshold, **draws)
        figures: JsonFields = {
            "name": shown_group(str(name), len(measured)),
            "images": int(use.sum()),
            "identities": len(np.unique(part.clusters)),
            "recall_at_own_threshold": {**own.recall[0].to_json()},
            "recall_at_common_threshold": {**recall.to_json()} if recall else None,
            "false_accept_rate_at_common_threshold": {**accepts.to_json()} if accepts else None,
        }
        measured.append((own.recall[0].to_json()["value"], figures))
    measured.sort(key=lambda group: group[0])
    return {"measured": [figures for _, figures in measured], "too_small": too_small}
