"""The figures that runs are compared by, as plain numbers under the same names everywhere."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def privacy_figures(report: Mapping[str, Any]) -> dict[str, float]:
    """Price of the run, and of all runs of its policy for the user charged most.

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
    """The model, its public start and the gain over it, as far as they were measured.

    Args:
      report: JSON of a utility report, of embeddings or of a classifier.
    """
    start = report["public_backbone"]
    if "headline_rate" in report:
        rate = report["headline_rate"]
        found = {"recall": rate and report["recall_at_far"][rate]["value"]}
        if rate and start:
            found["recall_public_start"] = start["recall_at_far"][rate]["value"]
            found["gain"] = start["difference"][rate]["value"]
    else:
        model = report["model"]
        found = {name: model and model[name]["value"] for name in ("top_1", "top_5")}
        if model and start:
            found["top_1_public_start"] = start["top_1"]["value"]
            found["gain"] = start["difference"]["value"]
    return _finite(found)


def _finite(values: Mapping[str, Any]) -> dict[str, float]:
    numbers = {name: float(value) for name, value in values.items() if value is not None}
    return {name: value for name, value in numbers.items() if math.isfinite(value)}
