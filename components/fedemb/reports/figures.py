"""Metrics for the comparison of runs, as numbers with the same names everywhere."""

from __future__ import annotations

import math
from collections.abc import Mapping

from fedemb.documents.classifier import ClassifierReport
from fedemb.documents.fields import Interval
from fedemb.documents.privacy_report import PrivacyReport
from fedemb.documents.utility import AnyUtility


def privacy_figures(report: PrivacyReport) -> dict[str, float]:
    """Returns epsilon of the run, and of all runs of its policy for the user charged most."""
    accounting, cumulative = report.accounting, report.cumulative
    return _finite(
        {
            "epsilon": accounting.epsilon,
            "delta": accounting.delta,
            "epsilon_cumulative": cumulative.max_block_epsilon,
            "epsilon_cap": cumulative.cap,
        }
    )


def utility_figures(report: AnyUtility) -> dict[str, float]:
    """Returns metrics of the model, its public backbone, the best baseline and the gain over it.

    Unmeasured metrics are omitted.
    """
    name, found = "recall", dict[str, float | None]()
    if isinstance(report, ClassifierReport):
        name, found["top_5"] = "top_1", _value(report.model and report.model.top_5)
    found[name] = _value(report.headline())
    if report.best_start is not None:
        found[f"{name}_public_start"] = _value(report.headline("public_backbone"))
        found[f"{name}_best_start"] = _value(report.headline(report.best_start))
        found["gain"] = _value(report.gain)
        if report.gain is not None:
            found["gain_low"], found["gain_high"] = report.gain.low, report.gain.high
    return _finite(found)


def _value(figure: Interval | None) -> float | None:
    return figure and figure.value


def _finite(values: Mapping[str, float | None]) -> dict[str, float]:
    return {
        name: value for name, value in values.items() if value is not None and math.isfinite(value)
    }
