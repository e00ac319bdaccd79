"""How good a classifier is: top-1, top-5, per class and per group, calibration; all over units.

Intervals resample users, who bring all their images with them; models are compared on the same
draws. A class or a group of fewer than `SMALLEST` users is counted and not shown: its figure would
say little of the model and much of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedemb.evaluation.bootstrap import Estimate, draw_weights, weighted_mean

SMALLEST = 10
"""Users of a class or group whose figure is shown, at least."""
_BINS = 15


def measure_classifiers(
    probabilities: Mapping[str, np.ndarray],
    labels: np.ndarray,
    users: np.ndarray,
    subgroups: np.ndarray,
    classes: Sequence[str],
    *,
    samples: int,
    seed: int = 0,
) -> dict[str, Any]:
    """Measures classifiers on the same images.

    Args:
      probabilities: by name float32 `[images, classes]`; `model` is compared with the others.
      labels: int64 `[images]`, places in `classes`.
      users: owners `[images]`, who are resampled.
      subgroups: text `[images]`, empty where none is named.
      classes: names.
      samples: bootstrap draws.
      seed: of the draws.

    Returns:
      The `classification` section of a utility report.
    """
    _, units = np.unique(users, return_inverse=True)
    weights = draw_weights(int(units.max()) + 1, samples, seed)

    def mean(values: np.ndarray, use: np.ndarray | None = None) -> Estimate:
        return weighted_mean(values.astype(np.float64), units, weights, use)

    def top(table: np.ndarray, count: int) -> np.ndarray:
        # Ties count against the model.
        own = table[np.arange(len(labels)), labels][:, None]
        return (table >= own).sum(axis=1) <= count

    def figures(table: np.ndarray) -> dict[str, Estimate]:
        own = table[np.arange(len(labels)), labels]
        return {
            "top_1": mean(top(table, 1)),
            "top_5": mean(top(table, 5)),
            "log_loss": mean(-np.log(np.maximum(own, 1e-12))),
        }

    def parts(names: Sequence[str], places: np.ndarray) -> dict[str, Any]:
        right = top(probabilities["model"], 1)
        shown, too_small = [], 0
        for place, name in enumerate(names):
            use = places == place
            people = len(np.unique(units[use]))
            if people < SMALLEST:
                too_small += 1
                continue
            estimate = mean(right, use).to_json()
            shown.append({"name": name, "images": int(use.sum()), "users": people, **estimate})
        return {"shown": shown, "too_small": too_small}

    measured = {name: figures(table) for name, table in probabilities.items()}
    groups = np.unique(subgroups)
    return {
        "images": len(labels),
        "users": len(weights[0]),
        "models": {
            name: {
                **{figure: estimate.to_json() for figure, estimate in found.items()},
                "calibration_error": _calibration_error(probabilities[name], labels),
                "top_1_difference": (measured["model"]["top_1"] - found["top_1"]).to_json(),
            }
            for name, found in measured.items()
        },
        "classes": parts(classes, labels),
        "groups": parts(list(map(str, groups)), np.searchsorted(groups, subgroups)),
    }


def _calibration_error(table: np.ndarray, labels: np.ndarray) -> float:
    """Mean gap between confidence and accuracy over equal bins of confidence (ECE)."""
    confidence, right = table.max(axis=1), table.argmax(axis=1) == labels
    bins = np.minimum((confidence * _BINS).astype(int), _BINS - 1)
    gaps = np.bincount(bins, confidence.astype(np.float64) - right, minlength=_BINS)
    return round(float(np.abs(gaps).sum() / len(labels)), 6)


def classification_sentence(section: dict[str, Any], public_kind: str) -> str:
    """One sentence: top-1 with its interval, and what private training added to its start."""
    found, models = section["models"]["model"]["top_1"], section["models"]
    text = (
        f"On {section['images']:,} images of {section['users']:,} users who never trained, the "
        f"model names the class of {_percent(found)}"
    )
    names = {
        "public_start": "the untrained start" if public_kind == "none" else "the public start",
        "centralized": "training without privacy",
    }
    clauses = [
        f"{100 * models[name]['top_1_difference']['value']:+.1f} points "
        f"[{100 * models[name]['top_1_difference']['low']:.1f}, "
        f"{100 * models[name]['top_1_difference']['high']:.1f}] against {words}"
        for name, words in names.items()
        if name in models
    ]
    return text + (": " + ", and ".join(clauses) if clauses else "") + "."


def _percent(estimate: dict[str, float]) -> str:
    return "{value:.1f} % [{low:.1f}, {high:.1f}]".format(
        **{name: 100 * estimate[name] for name in ("value", "low", "high")}
    )
