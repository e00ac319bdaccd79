"""Metrics for the comparison of runs, as numbers with the same names everywhere."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from fedemb.documents.classifier import ClassifierReport
from fedemb.documents.utility import UtilityReport


def privacy_figures(report: Mapping[str, Any]) -> dict[str, float]:
    """Returns epsilon of the run, and of all runs of its policy for the user charged most.

    Args:
      report: JSON of a privacy report.
    """
    accounting, cumulative = report["accounting"], report["cumulative"]
    return _finite(
        {
            "epsilon": accounting["epsilon"],
            "delta": accounting["delta"],
            "epsilon_cumulative": cumulative["max_block_epsilon"],
            "epsilon_cap": cumulative["cap"],
        }
    )


def utility_figures(report: Mapping[str, Any]) -> dict[str, float]:
    """Returns metrics of the model, its public backbone, the best baseline and the gain over it.

    Unmeasured metrics are omitted.

    Args:
      report: JSON of a utility report, of embeddings or of a classifier.
    """
    if "headline_rate" in report:
        rate, name, starts = report["headline_rate"], "recall", UtilityReport.starts
        found = {name: rate and report["recall_at_far"][rate]["value"]}
    else:
        rate, name, starts = None, "top_1", ClassifierReport.starts
        found = {
            name: report["model"] and report["model"][name]["value"] for name in (name, "top_5")
        }
    parts = {start: report.get(start) for start in starts}
    of_starts = {
        start: (part["recall_at_far"][rate] if rate else part[name])["value"]
        for start, part in parts.items()
        if part
    }
    if "public_backbone" in of_starts:
        best = max(of_starts, key=lambda start: of_starts[start])
        found[f"{name}_public_start"] = of_starts["public_backbone"]
        found[f"{name}_best_start"] = of_starts[best]
        difference = report[best]["difference"]
        found["gain"] = (difference[rate] if rate else difference)["value"]
    return _finite(found)


def _finite(values: Mapping[str, Any]) -> dict[str, float]:
    numbers = {name: float(value) for name, value in values.items() if value is not None}
    return {name: value for name, value in numbers.items() if math.isfinite(value)}
