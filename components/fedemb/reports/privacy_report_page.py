"""The page of the privacy report: for the lawyer, the engineer and the operator."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from fedemb.ledger.history import Point, history, worst_block
from fedemb.ledger.ledger import Ledger, Spent
from fedemb.reports import report as pages
from fedemb.reports.dag import LineageStep, lineage_dag

_TICKS = 6
"""Dates on the axis of spending, at most."""


def report_page(
    report: dict[str, Any],
    ledger: Ledger,
    projections: list[dict[str, Any]],
    lineage: Sequence[LineageStep],
) -> str:
    """Renders `privacy_report.html`.

    Args:
      report: the signed report.
      ledger: ledger of its policy, for the spending over time.
      projections: of the plan, shown as projections only.
      lineage: what each step took and gave.
    """
    cumulative = report["cumulative"]
    block = worst_block(ledger, tuple(row["block"] for row in cumulative["blocks"]))
    last = cumulative["ledger_sequence"]
    points = history(ledger, block, last) if block else []
    before = _before(report, ledger, block)
    after = cumulative["max_block_epsilon"]
    simulation = report["purpose"] == "simulation"
    within = after is not None and after <= cumulative["cap"]
    return pages.render(
        "privacy_report.html",
        tone="plain" if simulation else "good" if within else "bad",
        report=report,
        simulation=simulation,
        within=within,
        block=block,
        before=before.epsilon if before else 0.0,
        after=after if after is not None else math.inf,
        odds=_odds(report["accounting"]["epsilon"]),
        projections=projections,
        lineage=lineage_dag(lineage),
        curve=_curve(report),
        spending=_spending(points, cumulative["cap"]),
    )


def _before(report: dict[str, Any], ledger: Ledger, block: str | None) -> Spent | None:
    """Price of the worst block without this run."""
    if block is None:
        return None
    own = (report["run_id"], report["attempt"])
    state = ledger.state
    attempt = state.attempts[own]
    others = [item for item in state.by_block[block] if item.charged and item is not attempt]
    from fedemb.ledger.budget import spent

    return spent(ledger.terms, [item.charge for item in others])


def _odds(epsilon: float | None) -> float | None:
    """By what factor one user's data can move the odds of any conclusion."""
    return math.exp(epsilon) if epsilon is not None and epsilon < 50 else None


def _curve(report: dict[str, Any]) -> Any:
    points = report["accounting"]["curve"]
    if not points:
        return None
    deltas, epsilons = [point[0] for point in points], [point[1] for point in points]
    delta = report["accounting"]["delta"]
    return pages.line_chart(
        [pages.Line("this run", deltas, epsilons)],
        x_label="delta",
        y_label="epsilon",
        alt="Epsilon of this run over delta, logarithmic delta axis; the policy's delta is marked",
        x_log=True,
        y_limits=(0.0, max(epsilons) * 1.08),
        marks=[("policy", delta)],
    )


def _spending(points: list[Point], cap: float) -> Any:
    if not points:
        return None
    records = [0, *(point.sequence for point in points)]
    spent = [0.0, *(point.epsilon for point in points)]
    ends = [0, records[-1]]
    shown = points[:: -(-len(points) // _TICKS)]
    ticks = [
        (point.sequence, f"{point.sequence}\n{datetime.fromisoformat(point.time):%-d %b}")
        for point in shown
    ]
    return pages.line_chart(
        [pages.Line("spent", records, spent), pages.Line("cap", ends, [cap, cap])],
        x_label="ledger record and its date",
        y_label="cumulative epsilon",
        alt="Cumulative epsilon of the fullest user block over the ledger's records, with its cap",
        y_limits=(0.0, max([cap, *spent]) * 1.08),
        x_ticks=ticks,
        steps=True,
    )
