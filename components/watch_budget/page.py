"""HTML page of the budget view."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from markupsafe import Markup

from fedemb.ledger import Ledger
from fedemb.reports.charts import Axis, Line, line_chart
from fedemb.reports.report import render
from fedemb.steps.watch_budget.forecast import Due, forecast
from fedemb.steps.watch_budget.view import BlockBudget, BudgetView

TICKS = 4
FORECAST_POINTS = 8
"""Maximum number of points of the forecast; a planned series takes PLD seconds for each."""


Viewed = tuple[BudgetView, Ledger, Sequence[Due]]
"""A view with its ledger and the scheduled runs of its forecast."""


def budget_page(views: Sequence[Viewed]) -> str:
    """Renders `budget_view.html`: one section for each policy."""
    sections = [_section(view, ledger, due) for view, ledger, due in views]
    over = [section for section in sections if section["tone"] == "bad"]
    return render(
        "budget_view.html",
        tone="bad" if over else "plain" if any(s["reached"] for s in sections) else "good",
        time=max(view.time for view, _, _ in views).isoformat(),
        sections=sections,
    )


def headline(view: BudgetView) -> str:
    """Returns the state of a policy in one sentence."""
    if not view.blocks:
        return f"Policy {view.policy_id}: nothing is charged, the cap is epsilon {view.cap:g}."
    fullest, first = view.blocks[0], view.first_reached
    if fullest.remaining < 0:
        return f"Policy {view.policy_id}: block {fullest.block} is above the cap of {view.cap:g}."
    left = f"{_shown(fullest.remaining)} of epsilon {view.cap:g} remains in block {fullest.block}"
    if fullest.planned_runs_left is not None:
        left += f", for {fullest.planned_runs_left} more planned runs"
    if first is None or first.forecast is None:
        fits = "; all scheduled runs fit" if view.schedules else ""
        return f"Policy {view.policy_id}: {left}{fits}."
    year, week = str(first.forecast.week).split("-W")
    return (
        f"Policy {view.policy_id}: cap reached in week {int(week)} of {year} in block "
        f"{first.block}; {left}."
    )


def _section(view: BudgetView, ledger: Ledger, due: Sequence[Due]) -> dict[str, Any]:
    over = bool(view.blocks) and view.blocks[0].remaining < 0
    return {
        "view": view,
        "headline": headline(view),
        "tone": "bad" if over else "plain",
        "reached": view.first_reached is not None,
        "rows": [_row(row, view.cap) for row in view.blocks],
        "chart": _chart(view, ledger, due),
    }


def _row(row: BlockBudget, cap: float) -> dict[str, Any]:
    whole = max(cap, row.total) if math.isfinite(row.total) else math.inf
    shares = {
        part: 100.0 * getattr(row, part) / whole if math.isfinite(whole) else 0.0
        for part in ("spent", "reserved", "external")
    }
    if not math.isfinite(whole):
        shares["external"] = 100.0
    return {
        "block": row.block,
        "shares": shares,
        "spent": _shown(row.spent),
        "reserved": _shown(row.reserved),
        "external": _shown(row.external),
        "total": _shown(row.total),
        "remaining": _shown(row.remaining),
        "over": row.remaining < 0,
        "counts": (
            f"{row.runs} run{'' if row.runs == 1 else 's'}, {row.reservations} open, "
            f"{row.external_charges} external"
        ),
        "forecast": row.forecast.sentence() if row.forecast else "",
    }


def _chart(view: BudgetView, ledger: Ledger, due: Sequence[Due]) -> Markup | None:
    """Draws epsilon over time of the block that reaches the cap first, or of the fullest."""
    row = view.first_reached or next(iter(view.blocks), None)
    if row is None:
        return None
    history = [
        (datetime.fromisoformat(point.time), point.epsilon)
        for point in ledger.state.price_history(row.block)
        if math.isfinite(point.epsilon)
    ]
    planned = _planned(ledger, row.block, [run for run in due if row.block in run.blocks])
    if len(history) + len(planned) < 2 or not math.isfinite(row.total):
        return None
    now = (view.time, row.total)
    lines = [_line("charged", [*history, now])]
    if planned:
        lines.append(_line("scheduled", [now, *planned]))
    moments = [moment for moment, _ in [*history, now, *planned]]
    first, last = min(moments), max(moments)
    lines.append(_line("cap", [(first, view.cap), (last, view.cap)]))
    highest = max(view.cap, *(value for line in lines for value in line.y))
    return line_chart(
        lines,
        x=Axis("date (UTC)", ticks=_ticks(first, last)),
        y=Axis(f"epsilon of block {row.block}", limits=(0.0, 1.08 * highest)),
        alt=f"Cumulative epsilon of block {row.block} of policy {view.policy_id} over time",
        steps=True,
    )


def _planned(ledger: Ledger, block: str, due: Sequence[Due]) -> list[tuple[datetime, float]]:
    """Returns epsilon after some of the scheduled runs, up to the last run that fits."""
    charges = ledger.state.charges(block)
    fitting = forecast(ledger.terms, charges, due).fitting if due else 0
    step = max(1, -(-fitting // FORECAST_POINTS))
    return [
        (due[runs - 1].time, forecast(ledger.terms, charges, due[:runs]).epsilon)
        for runs in range(fitting, 0, -step)[::-1]
    ]


def _line(name: str, points: Sequence[tuple[datetime, float]]) -> Line:
    return Line(name, [_days(moment) for moment, _ in points], [value for _, value in points])


def _days(moment: datetime) -> float:
    return moment.timestamp() / 86_400


def _ticks(first: datetime, last: datetime) -> list[tuple[float, str]]:
    """Returns evenly spaced dates; times of day if all points are within two days."""
    low, high = _days(first), _days(last)
    pattern = "%-d %b %Y" if high - low > 2 else "%-d %b %H:%M"
    values = [low + (high - low) * number / (TICKS - 1) for number in range(TICKS)]
    return [(x, f"{datetime.fromtimestamp(x * 86_400, UTC):{pattern}}") for x in values]


def _shown(value: float) -> str:
    if not math.isfinite(value):
        return "infinite" if value > 0 else "none"
    return f"{value:.3g}"
