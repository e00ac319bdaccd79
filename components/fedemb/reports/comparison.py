"""Comparison of two runs: figures, settings, groups, public data counts and durations."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from fedemb.config import RunConfig
from fedemb.documents.classifier import ClassifierReport
from fedemb.documents.fields import Interval
from fedemb.documents.model import Pretrained
from fedemb.documents.privacy_report import PrivacyReport
from fedemb.documents.utility import AnyUtility
from fedemb.foundation.addresses import redacted
from fedemb.foundation.canonical_json import Json
from fedemb.reports.formats import figure, points, seconds, significant
from fedemb.reports.headline import Figure, Headline
from fedemb.reports.report import render
from fedemb.reports.utility_words import deciding_start

NOT_PAIRED = (
    "Runs with other keys hold out other users, so intervals of two runs are not paired. A change "
    "within both intervals may be chance."
)
_INTERNAL = "storage."
"""Settings that are left out: addresses of stores differ between machines, not between models."""


@dataclass(frozen=True)
class ComparedRun:
    """One side of a comparison; None: the run has no such document, or its signature is unknown."""

    name: str
    headline: Headline
    config: RunConfig | None
    report: PrivacyReport | None
    utility: AnyUtility | None
    pretrained: Pretrained | None
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Step -> duration."""


class Row(NamedTuple):
    """A label, its value in both runs, and the change from the first to the second."""

    label: str
    first: str
    second: str
    change: str = ""


class Table(NamedTuple):
    """Rows with a title, and a sentence shown instead of no rows."""

    title: str
    rows: tuple[Row, ...]
    empty: str


def compare(first: ComparedRun, second: ComparedRun) -> tuple[Table, ...]:
    """Returns the tables of a comparison, in the order in which a release is decided."""
    return (
        Table("Figures", tuple(_figures(first, second)), ""),
        Table(
            "Settings that differ",
            tuple(_settings(first.config, second.config)),
            "The configuration of one run is not published."
            if first.config is None or second.config is None
            else "All settings are equal.",
        ),
        Table(
            "Groups",
            tuple(_groups(first.utility, second.utility)),
            "Neither run reports figures for groups or classes.",
        ),
        Table("Public data counts", tuple(_counts(first, second)), "No counts are published."),
        Table(
            "Durations",
            tuple(_durations(first.seconds, second.seconds)),
            "Neither run recorded durations.",
        ),
    )


def comparison_page(first: ComparedRun, second: ComparedRun) -> str:
    """Renders `run_comparison.html`."""
    return render(
        "run_comparison.html",
        tone="plain",
        first=first,
        second=second,
        tables=compare(first, second),
        note=NOT_PAIRED,
    )


def comparison_lines(first: ComparedRun, second: ComparedRun) -> list[str]:
    """Returns the comparison as lines of text in four aligned columns."""
    tables = compare(first, second)
    head = Row("", first.name, second.name, "change")
    rows = [head, *(row for table in tables for row in table.rows)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def line(row: Row) -> str:
        return "  ".join(map(str.ljust, row, widths)).rstrip()

    lines = [line(head)]
    for table in tables:
        lines += ["", table.title, *(map(line, table.rows) if table.rows else (table.empty,))]
    return [*lines, "", NOT_PAIRED]


def _figures(first: ComparedRun, second: ComparedRun) -> Iterable[Row]:
    yield Row("Headline", first.headline.title, second.headline.title)
    rows = [run.headline.figures.rows()[:2] for run in (first, second)]
    values = [
        (run.headline.figures.epsilon_all, run.headline.figures.epsilon_run)
        for run in (first, second)
    ]
    for one, other, (low, high) in zip(*rows, zip(*values, strict=True), strict=True):
        yield Row(one.label, _noted(one), _noted(other), _change(low, high))
    yield Row(
        "Main figure on held-out users",
        _main(first.utility),
        _main(second.utility),
        _points_between(
            first.utility and first.utility.headline(), second.utility and second.utility.headline()
        ),
    )
    gains = [run.headline.figures.gain for run in (first, second)]
    yield Row("Gain", points(gains[0]), points(gains[1]), _points_between(*gains))
    yield Row("Baseline of the gain", _baseline(first.utility), _baseline(second.utility))


def _noted(row: Figure) -> str:
    return f"{row.value}, {row.note}" if row.note and row.value != "-" else row.value


def _main(utility: AnyUtility | None) -> str:
    found = None if utility is None else utility.headline()
    if utility is None or found is None:
        return "not measured"
    return f"{figure(found)}, {utility.headline_words}"


def _baseline(utility: AnyUtility | None) -> str:
    return "-" if utility is None or utility.gain is None else deciding_start(utility)


def _settings(first: RunConfig | None, second: RunConfig | None) -> Iterable[Row]:
    if first is None or second is None:
        return
    one, other = flat_settings(first), flat_settings(second)
    for name in {**one, **other}:
        if one.get(name) != other.get(name) and not name.startswith(_INTERNAL):
            yield Row(name, one.get(name, "-"), other.get(name, "-"))


def flat_settings(config: RunConfig) -> dict[str, str]:
    """Returns dotted names of all settings with their values as text, without credentials."""
    found: dict[str, str] = {}

    def walk(prefix: str, value: Json) -> None:
        if isinstance(value, dict) and value:
            for name, item in value.items():
                walk(f"{prefix}.{name}" if prefix else name, item)
        else:
            found[prefix] = redacted(value if isinstance(value, str) else json.dumps(value))

    walk("", config.model_dump(mode="json"))
    return found


def _groups(first: AnyUtility | None, second: AnyUtility | None) -> Iterable[Row]:
    one, other = _parts(first), _parts(second)
    for name in {**one, **other}:
        left, right = one.get(name), other.get(name)
        yield Row(name, figure(left), figure(right), _points_between(left, right))


def _parts(utility: AnyUtility | None) -> dict[str, Interval]:
    """Returns the figure of each group and class: recall, or top-1."""
    if utility is None:
        return {}
    if isinstance(utility, ClassifierReport):
        listed = {"class": utility.by_class, "group": utility.by_group}
        return {
            f"{kind} {part.name}, top-1": part.top_1
            for kind, parts in listed.items()
            for part in (parts.shown if parts else ())
        }
    found: dict[str, Interval] = {}
    for group in utility.subgroups.measured if utility.subgroups else ():
        common = group.recall_at_common_threshold
        threshold = "its own" if common is None else "the common"
        shown = group.recall_at_own_threshold if common is None else common
        found[f"group {group.name}, recall at {threshold} threshold"] = shown
    return found


def _counts(first: ComparedRun, second: ComparedRun) -> Iterable[Row]:
    one, other = _published_counts(first), _published_counts(second)
    for name in {**one, **other}:
        left, right = one.get(name), other.get(name)
        yield Row(name, _count(left), _count(right), _count_change(left, right))


def _published_counts(run: ComparedRun) -> dict[str, int]:
    """Returns counts that a run publishes: declared ones, public images, held-out users."""
    found: dict[str, int] = {}
    if run.report is not None:
        unit, mechanism = run.report.unit, run.report.mechanism
        found |= {
            f"{unit.unit}s, declared lower bound": unit.population_lower_bound,
            "virtual clients": mechanism.virtual_clients,
            "rounds planned": mechanism.rounds_planned,
            "rounds run": mechanism.rounds_run,
        }
    if run.pretrained is not None:
        found |= {
            "public images": run.pretrained.images,
            "public classes": run.pretrained.classes,
        }
    utility = run.utility
    if isinstance(utility, ClassifierReport):
        found |= {f"held-out {utility.unit}s": utility.units, "held-out images": utility.images}
    elif utility is not None and utility.evaluated is not None:
        evaluated = utility.evaluated
        found |= {
            "held-out identities": evaluated.identities,
            "held-out images": evaluated.images,
        }
    return found


def _durations(first: Mapping[str, float], second: Mapping[str, float]) -> Iterable[Row]:
    names = list({**first, **second})
    for name in names:
        yield _took(name, first.get(name), second.get(name))
    if names:
        yield _took("all steps", sum(first.values()), sum(second.values()))


def _took(name: str, first: float | None, second: float | None) -> Row:
    change = ""
    if first is not None and second is not None:
        sign = "+" if second >= first else "-"
        change = f"{sign}{seconds(abs(second - first))}"
    return Row(name, seconds(first), seconds(second), change)


def _change(first: float | None, second: float | None) -> str:
    if first is None or second is None:
        return ""
    return (
        "none" if first == second else ("+" if second > first else "") + significant(second - first)
    )


def _points_between(first: Interval | None, second: Interval | None) -> str:
    if first is None or second is None:
        return ""
    return f"{100 * (second.value - first.value):+.1f} points"


def _count(found: int | None) -> str:
    return "-" if found is None else f"{found:,}"


def _count_change(first: int | None, second: int | None) -> str:
    if first is None or second is None or first == second:
        return ""
    return f"{second - first:+,}"
