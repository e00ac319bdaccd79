"""Page of the utility report."""

from __future__ import annotations

from markupsafe import Markup

from fedemb.documents.utility import Compared, UtilityReport
from fedemb.reports import charts
from fedemb.reports.report import render, tone_of
from fedemb.reports.utility_words import covers, utility_sentence

NAMES = {
    "model": "this model",
    "public_backbone": "public backbone",
    "frozen_features": "frozen features",
    "untrained": "untrained net",
    "raw_pixels": "raw pixels",
    "centralized": "central, not private",
}


def display_name(name: str, report: UtilityReport) -> str:
    """Returns the display name of a model."""
    if name == "public_backbone" and report.public_kind == "none":
        return "untrained weights"
    return NAMES[name]


def _models(report: UtilityReport) -> list[tuple[str, UtilityReport | Compared]]:
    others = [(name, getattr(report, name)) for name in NAMES if name != "model"]
    return [
        ("this model", report),
        *((display_name(name, report), part) for name, part in others if part is not None),
    ]


def _recall_chart(report: UtilityReport, rate: str) -> Markup:
    figures = [(name, part.recall_at_far[rate]) for name, part in _models(report)]
    alt = f"Recall at a false accept rate of {rate}, with 95 % intervals"
    limits = (0.0, max(recall.high or recall.value for _, recall in figures) * 1.08 or 1.0)
    return charts.bar_chart(figures, x_label="recall", alt=alt, x_limits=limits)


def _roc_chart(report: UtilityReport) -> Markup:
    lines = [charts.Line(name, part.roc.far, part.roc.recall) for name, part in _models(report)]
    marks = [(f"FAR {rate}", float(rate)) for rate in report.recall_at_far]
    return charts.line_chart(
        lines,
        x=charts.Axis("false accept rate", log=True),
        y=charts.Axis("recall", limits=(0, 1.02)),
        alt="Recall over the false accept rate for each model, logarithmic axis",
        marks=marks,
        diagonal="chance",
    )


def utility_page(report: UtilityReport) -> str:
    """Returns the page of a report; the same report gives the same text."""
    charts = {}
    if report.headline_rate is not None:
        charts = {"recall": _recall_chart(report, report.headline_rate), "roc": _roc_chart(report)}
    return render(
        "utility_report.html",
        tone=tone_of(report.gain),
        report=report,
        sentence=utility_sentence(report),
        covers=covers("user"),
        models=_models(report) if report.measured else [],
        charts=charts,
    )
