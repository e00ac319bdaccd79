"""How good a classifier is: top-1, top-5, per class and per group, calibration; all over units.

What privacy costs is seldom the same for all classes and groups (Bagdasaryan, Poursaeed and
Shmatikov, arXiv 1905.12101), so each is compared with the other models too.

Intervals resample users, who bring all their images with them; models are compared on the same
draws. A class or a group of fewer than `SMALLEST` users is counted and not shown: its figure would
say little of the model and much of them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from fedemb.evaluation.bootstrap import Estimate, draw_weights, weighted_mean
from fedemb.evaluation.held_out import Subjects, shown_group
from fedemb.evaluation.metrics import require_finite

SMALLEST = 10
"""Users of a class or group whose figure is shown, at least."""
_BINS = 15
_SEED = 20221121
"""Of the draws: fixed, so that two reports on the same users can be paired."""


def measure_classifiers(
    probabilities: Mapping[str, np.ndarray],
    subjects: Subjects,
    classes: Sequence[str],
    *,
    samples: int,
    grouped: bool,
    averages: Collection[str] = (),
) -> dict[str, Any]:
    """Measures classifiers on the same images.

    Args:
      probabilities: by name float32 `[images, classes]`; `model` is compared with the others,
        and with the shares of the classes among these images.
      subjects: of at least one image; labels are places in `classes`.
      classes: names.
      samples: bootstrap draws.
      grouped: whether a column names groups.
      averages: the names that are other averages of the same weights: no class is compared there.

    Returns:
      The measured fields of a `ClassifierReport`.

    Raises:
      Diverged: a probability is not finite.
    """
    for table in probabilities.values():
        require_finite(table)
    labels = subjects.labels
    _, units = np.unique(subjects.users, return_inverse=True)
    weights = draw_weights(int(units.max()) + 1, samples, _SEED)
    rows = np.arange(len(labels))

    def mean(values: np.ndarray, use: np.ndarray | None = None) -> Estimate:
        return weighted_mean(values.astype(np.float64), units, weights, use)

    def top(table: np.ndarray, count: int) -> np.ndarray:
        """Chance that the class is among the first `count`, where ties are broken by lot."""
        own = table[rows, labels][:, None]
        before, tied = (table > own).sum(axis=1), (table == own).sum(axis=1)
        return np.clip((count - before) / tied, 0.0, 1.0)

    def figures(table: np.ndarray) -> dict[str, Any]:
        return {
            "top_5": mean(top(table, 5)).to_json(),
            "log_loss": mean(-np.log(np.maximum(table[rows, labels], 1e-12))).to_json(),
            **_calibration(table, labels, units, weights),
        }

    right = {name: top(table, 1) for name, table in probabilities.items()}
    shares = np.bincount(labels, minlength=len(classes)) / len(labels)
    compared = sorted(probabilities.keys() - {"model", *averages})
    tables = {**probabilities, "most_frequent": np.tile(shares, (len(labels), 1))}

    def parts(names: Sequence[str], places: np.ndarray) -> dict[str, Any]:
        shown, too_small = [], 0
        for place, name in enumerate(names):
            use = places == place
            people = len(np.unique(units[use]))
            if people < SMALLEST:
                too_small += 1
                continue
            found = {model: mean(right[model], use) for model in ("model", *compared)}
            own = found.pop("model")
            shown.append(
                {
                    "name": name,
                    "images": int(use.sum()),
                    "units": people,
                    "top_1": own.to_json(),
                    "compared": [
                        {
                            "model": model,
                            "top_1": other.to_json(),
                            "difference": (own - other).to_json(),
                        }
                        for model, other in found.items()
                    ],
                }
            )
        shown.sort(key=lambda part: part["top_1"]["value"])
        return {"shown": shown, "too_small": too_small}

    top_1 = {name: mean(top(table, 1)) for name, table in tables.items()}
    measured: dict[str, Any] = {
        name: {"top_1": top_1[name].to_json(), **figures(table)} for name, table in tables.items()
    }
    for name in measured.keys() - {"model"}:
        measured[name]["difference"] = (top_1["model"] - top_1[name]).to_json()
    groups = np.unique(subjects.subgroups)
    names = [shown_group(str(group), number) for number, group in enumerate(groups)]
    return {
        "images": len(labels),
        "units": len(weights[0]),
        **measured,
        "by_class": parts(classes, labels),
        "by_group": parts(names, np.searchsorted(groups, subjects.subgroups)) if grouped else None,
    }


def _calibration(
    table: np.ndarray, labels: np.ndarray, units: np.ndarray, weights: np.ndarray
) -> dict[str, Any]:
    """Mean gap between confidence and accuracy over equal bins of confidence (ECE), and its spread.

    Chance adds gaps to the images, and those of a draw once more: the draws are moved by twice the
    difference of their mean and the figure.
    """
    confidence, right = table.max(axis=1), table.argmax(axis=1) == labels
    bins = np.minimum((confidence * _BINS).astype(int), _BINS - 1)
    count = weights.shape[1]
    gaps = np.zeros((count, _BINS))
    np.add.at(gaps, (units, bins), confidence - right)
    sizes = np.bincount(units, minlength=count)

    def error(times: np.ndarray) -> np.ndarray:
        return np.abs(times @ gaps).sum(axis=1) / (times @ sizes)

    value, draws = error(np.ones((1, count)))[0], error(weights)
    moved = np.clip(draws - 2 * (draws.mean() - value), 0.0, 1.0)
    low, high = np.quantile(moved, [0.025, 0.975])
    return {
        "calibration_error": round(float(value), 6),
        "calibration_interval": {"low": round(float(low), 6), "high": round(float(high), 6)},
    }
