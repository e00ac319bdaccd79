"""Metrics of classifiers: top-1, top-5, calibration, per class and per group, over units.

The cost of privacy often differs between classes and groups (Bagdasaryan, Poursaeed and Shmatikov,
arXiv 1905.12101), so each class and group is also compared between models.

Intervals resample users with all their images. Models are compared on the same draws. A class or
group with fewer than `SMALLEST` users is counted but not shown, because its figure would reveal
more about these users than about the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fedemb.evaluation.held_out import Subjects, shown_group
from fedemb.evaluation.metrics import require_finite
from fedemb.evaluation.pairs import Estimate, draw_weights, weighted_mean
from fedemb.foundation.document import Fields

SMALLEST = 10
"""Minimum number of users of a class or group whose figure is shown."""
MOST_CLASSES = 30
"""Maximum number of classes in a confusion matrix."""
_BINS = 15
_SEED = 20221121
"""Seed of the draws; fixed, so that two reports on the same users can be paired."""


def measure_classifiers(
    probabilities: Mapping[str, np.ndarray],
    subjects: Subjects,
    classes: Sequence[str],
    *,
    samples: int,
    grouped: bool,
) -> Fields:
    """Returns the measured fields of a `ClassifierReport`, of models on the same images.

    Args:
      probabilities: model name -> float32 `[images, classes]`; `model` is compared with the other
        models, and with the shares of the classes among these images.
      subjects: at least one image; labels are indices in `classes`.
      classes: class names.
      samples: number of bootstrap draws.
      grouped: whether a column names groups.

    Raises:
      Diverged: a probability is not finite.
    """
    for table in probabilities.values():
        require_finite(table)
    measured = _Measured.of(subjects, samples)
    shares = np.bincount(subjects.labels, minlength=len(classes)) / len(subjects.labels)
    tables = {**probabilities, "most_frequent": np.tile(shares, (len(subjects.labels), 1))}
    top_1 = {name: measured.mean(measured.top(table, 1)) for name, table in tables.items()}
    figures = {
        name: {"top_1": top_1[name].to_json(), **measured.figures(table)}
        for name, table in tables.items()
    }
    for name in figures.keys() - {"model"}:
        figures[name]["difference"] = (top_1["model"] - top_1[name]).to_json()
    compared = sorted(probabilities.keys() - {"model"})
    right = {name: measured.top(probabilities[name], 1) for name in ("model", *compared)}
    groups = np.unique(subjects.subgroups)
    names = [shown_group(str(group), number) for number, group in enumerate(groups)]
    places = np.searchsorted(groups, subjects.subgroups)
    return {
        "images": len(subjects.labels),
        "units": len(measured.weights[0]),
        **figures,
        "reliability": _reliability(measured, probabilities["model"]),
        "confusion": _confusion(measured, probabilities["model"], classes),
        "by_class": _parts(measured, right, classes, subjects.labels),
        "by_group": _parts(measured, right, names, places) if grouped else None,
    }


@dataclass(frozen=True)
class _Measured:
    """Images that all models are measured on, and their common bootstrap draws.

    Attributes:
      labels: int `[images]`, indices in the list of classes.
      units: int `[images]`, number of the unit that owns the image.
      weights: bootstrap weights `[samples, units]`.
    """

    labels: np.ndarray
    units: np.ndarray
    weights: np.ndarray

    @classmethod
    def of(cls, subjects: Subjects, samples: int) -> _Measured:
        """Returns the images of held-out subjects with `samples` draws."""
        _, units = np.unique(subjects.users, return_inverse=True)
        weights = draw_weights(int(units.max()) + 1, samples, _SEED)
        return cls(subjects.labels, units, weights)

    def mean(self, values: np.ndarray, use: np.ndarray | None = None) -> Estimate:
        """Returns the mean over units of a value per image `[images]`, of the images in `use`."""
        return weighted_mean(values.astype(np.float64), self.units, self.weights, use)

    def own(self, table: np.ndarray) -> np.ndarray:
        """Returns the probability of each image's own class, `[images]`."""
        return table[np.arange(len(self.labels)), self.labels]

    def top(self, table: np.ndarray, count: int) -> np.ndarray:
        """Returns the chance that the class is among the first `count`; ties count by share."""
        own = self.own(table)[:, None]
        before, tied = (table > own).sum(axis=1), (table == own).sum(axis=1)
        return np.clip((count - before) / tied, 0.0, 1.0)

    def figures(self, table: np.ndarray) -> Fields:
        """Returns top-5 accuracy, log loss and calibration of a table of probabilities."""
        log_loss = -np.log(np.maximum(self.own(table), 1e-12))
        return {
            "top_5": self.mean(self.top(table, 5)).to_json(),
            "log_loss": self.mean(log_loss).to_json(),
            **_calibration(table, self.labels, self.units, self.weights),
        }


def _parts(
    measured: _Measured, right: Mapping[str, np.ndarray], names: Sequence[str], places: np.ndarray
) -> Fields:
    """Returns accuracy by class or group, lowest first, and the number of parts left out.

    `right` has the chance `[images]` that the first class of a model is right, and `places` the
    index `[images]` of the part.
    """
    shown, too_small = [], 0
    for place, name in enumerate(names):
        use = places == place
        people = len(np.unique(measured.units[use]))
        if people < SMALLEST:
            too_small += 1
            continue
        found = {model: measured.mean(values, use) for model, values in right.items()}
        own = found.pop("model")
        compared = [
            {"model": model, "top_1": other.to_json(), "difference": (own - other).to_json()}
            for model, other in found.items()
        ]
        part = {
            "name": name,
            "images": int(use.sum()),
            "units": people,
            "top_1": own.to_json(),
            "compared": compared,
        }
        shown.append((round(own.value, 6), part))
    shown.sort(key=lambda pair: pair[0])
    return {"shown": [part for _, part in shown], "too_small": too_small}


def _reliability(measured: _Measured, table: np.ndarray) -> list[Fields]:
    """Returns confidence and accuracy by bin of confidence; bins of too few units are left out."""
    confidence, right = table.max(axis=1), measured.top(table, 1)
    bins = np.minimum((confidence * _BINS).astype(int), _BINS - 1)
    shown = []
    for number in np.unique(bins):
        use = bins == number
        if len(np.unique(measured.units[use])) < SMALLEST:
            continue
        shown.append(
            {
                "images": int(use.sum()),
                "confidence": round(float(confidence[use].mean()), 6),
                "accuracy": round(float(right[use].mean()), 6),
            }
        )
    return shown


def _confusion(measured: _Measured, table: np.ndarray, classes: Sequence[str]) -> Fields | None:
    """Returns, per true class, the share of images by predicted class.

    Classes with too few units have no row, and predictions of them are one column. None for more
    than `MOST_CLASSES` classes, or without a class to show.
    """
    people = [len(np.unique(measured.units[measured.labels == i])) for i in range(len(classes))]
    shown = [i for i, count in enumerate(people) if count >= SMALLEST]
    if len(classes) > MOST_CLASSES or not shown:
        return None
    predicted = table.argmax(axis=1)
    rows = []
    for place in shown:
        counts = np.bincount(predicted[measured.labels == place], minlength=len(classes))
        shares = counts / counts.sum()
        kept = [round(float(shares[other]), 6) for other in shown]
        rest = round(float(np.delete(shares, shown).sum()), 6)
        rows.append({"name": classes[place], "shares": kept, "others": rest})
    return {"classes": [classes[place] for place in shown], "rows": rows}


def _calibration(
    table: np.ndarray, labels: np.ndarray, units: np.ndarray, weights: np.ndarray
) -> Fields:
    """Returns the gap between confidence and accuracy over equal bins (ECE), and its spread.

    Sampling noise increases the gap of the images, and resampling increases it again. So the draws
    are shifted by twice the difference between their mean and the figure.
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
