"""What the utility report says in words, from its fields."""

from __future__ import annotations

from fedemb.documents.classifier import ClassifierReport
from fedemb.documents.fields import Interval
from fedemb.documents.utility import AnyUtility, UtilityReport
from fedemb.privacy.accounting.units import UNITS, Unit

LEAST_RESAMPLED = 6
"""Identities or units an interval is drawn from, at least: five that gain nothing all seem to gain
by chance once in 32 times, and then every draw of them does."""


def covers(unit: Unit) -> str:
    """Whom the guarantee covers, and of whom the figures are."""
    many = UNITS[unit].many
    return (
        f"The privacy guarantee covers training {many} only. The figures are exact, without "
        f"noise, on evaluation {many}, which never trained and which it does not cover."
    )


def _points(estimate: Interval) -> str:
    low, high = sorted((abs(estimate.low), abs(estimate.high)))
    return f"{100 * abs(estimate.value):.1f} points [{100 * low:.1f}, {100 * high:.1f}]"


def compared(difference: Interval, than: str) -> str:
    """Says a paired difference in words; only an interval without zero is called a difference."""
    if difference.low > 0:
        return f"{_points(difference)} more than {than}"
    if difference.high < 0:
        return f"{_points(difference)} less than {than}"
    return (
        f"not distinguishable from {than} "
        f"({100 * difference.value:+.1f} points [{100 * difference.low:+.1f}, "
        f"{100 * difference.high:+.1f}])"
    )


def _rate(rate: str) -> str:
    share = 1 / float(rate)
    return (
        f"1 in {share:,.0f}" if abs(share - round(share)) < 1e-6 * share else f"a share of {rate}"
    )


def utility_sentence(report: AnyUtility) -> str:
    """One sentence: the headline figure with its interval, compared with where training started."""
    return _classifier(report) if isinstance(report, ClassifierReport) else _embeddings(report)


def _embeddings(report: UtilityReport) -> str:
    rate, recall = report.headline_rate, report.headline()
    if report.evaluated is None or rate is None or recall is None:
        return (
            "Utility could not be measured: the held-out users give no pair of images of one "
            "identity and of two; hold out more users (partition.evaluation)."
        )
    text = (
        f"On {report.evaluated.identities:,} identities that never trained, the model recognises "
        f"{_percent(recall)} of "
        f"the pairs that belong together while it accepts {_rate(rate)} of the others"
    )
    return text + _against(report, "backbone") + _too_few(report) + weak_start(report)


def few_resampled(report: AnyUtility) -> str:
    """Why an interval is none: too little was there to draw from."""
    what = "identities" if isinstance(report, UtilityReport) else f"{report.unit}s"
    return f"its interval, drawn from {report.resampled} {what}, is none below {LEAST_RESAMPLED}"


def _too_few(report: AnyUtility) -> str:
    if report.resampled >= LEAST_RESAMPLED:
        return ""
    return f" Intervals drawn from fewer than {LEAST_RESAMPLED} are none; hold out more."


def weak_start(report: UtilityReport) -> str:
    """Says that a pretrained start is worse than no training at all; empty where it is not."""
    start = report.headline("public_backbone")
    if report.public_kind == "none" or start is None:
        return ""
    others = {"an untrained backbone": "untrained", "raw pixels": "raw_pixels"}
    found = ((words, report.headline(name)) for words, name in others.items())
    better = [
        f"{words} {_percent(part)}" for words, part in found if part and part.value > start.value
    ]
    if not better:
        return ""
    return (
        f" The public start is weak: it recognises {_percent(start)}, {' and '.join(better)}; part "
        "of the gain is what a better start gives without private data."
    )


def _classifier(report: ClassifierReport) -> str:
    top_1 = report.headline()
    if top_1 is None:
        return (
            f"Utility could not be measured: no {report.unit} was held out; hold out more "
            "(partition.evaluation)."
        )
    images = f"{report.images:,} images"
    whose = f"of {report.units:,} users who" if report.unit == "user" else "that"
    text = (
        f"On {images} {whose} never trained, the model names the right one of {report.classes} "
        f"classes for {_percent(top_1)}"
    )
    return text + _against(report, "classifier") + _too_few(report)


def _percent(share: Interval) -> str:
    return f"{100 * share.value:.1f} % [{100 * share.low:.1f}, {100 * share.high:.1f}]"


def _against(report: AnyUtility, noun: str) -> str:
    start = f"the public {noun} before private training"
    if report.public_kind == "none":
        start = f"an untrained {noun}"
    others = {
        "public_backbone": start,
        "untrained": f"an untrained {noun}",
        "centralized": "central training without privacy",
    }
    differences = ((report.difference(name), words) for name, words in others.items())
    clauses = [compared(found, words) for found, words in differences if found is not None]
    return (": " + ", and ".join(clauses) if clauses else "") + "."
