"""Page of a classifier's utility report."""

from __future__ import annotations

from markupsafe import Markup

from fedemb.documents.classifier import (
    Classified,
    ClassifiedParts,
    ClassifierReport,
    ComparedClassifier,
)
from fedemb.reports import charts
from fedemb.reports.report import render, tone_of
from fedemb.reports.utility_words import cost_of_privacy, covers, utility_sentence

_NAMES = {
    "public_backbone": "public backbone",
    "untrained": "untrained",
    "most_frequent": "most frequent class",
    "centralized": "central, not private",
    "previous_release": "previous release",
}


def classifier_page(report: ClassifierReport) -> str:
    """Returns the page of a report; the same report gives the same text."""
    others: list[tuple[str, ComparedClassifier]] = [
        (_display_name(name, report), part)
        for name in _NAMES
        if (part := getattr(report, name)) is not None
    ]
    models: list[tuple[str, Classified]] = [("this model", report.model)] if report.model else []
    models += others
    return render(
        "classifier_report.html",
        tone=tone_of(report.gain),
        report=report,
        sentence=utility_sentence(report),
        covers=covers(report.unit),
        models=models,
        others=others,
        parts=[
            (title, parts, _compared(parts, report), cost_of_privacy(parts, title))
            for title, parts in (("class", report.by_class), ("group", report.by_group))
            if parts is not None
        ],
        chart=_chart(models) if models else None,
        reliability=_reliability_chart(report),
    )


def _compared(parts: ClassifiedParts, report: ClassifierReport) -> dict[str, str]:
    """Returns the models with a column in a table of parts: all except `untrained`."""
    found = [other.model for part in parts.shown[:1] for other in part.compared]
    return {name: _display_name(name, report) for name in found if name != "untrained"}


def _display_name(name: str, report: ClassifierReport) -> str:
    if name == "public_backbone" and report.public_kind == "none":
        return "untrained weights"
    return _NAMES[name]


def _reliability_chart(report: ClassifierReport) -> Markup | None:
    bins = report.reliability
    if not bins:
        return None
    line = charts.Line("this model", [b.confidence for b in bins], [b.accuracy for b in bins])
    return charts.line_chart(
        [line],
        x=charts.Axis("confidence"),
        y=charts.Axis("accuracy", limits=(0, 1.02)),
        alt="Accuracy over confidence: "
        + ", ".join(f"{b.accuracy:.2f} at {b.confidence:.2f}" for b in bins),
        diagonal="calibrated",
    )


def _chart(models: list[tuple[str, Classified]]) -> Markup:
    figures = [(name, part.top_1) for name, part in models]
    alt = "Share of images whose class is named first, with 95 % intervals"
    return charts.bar_chart(figures, x_label="top-1", alt=alt, x_limits=(0.0, 1.0))
