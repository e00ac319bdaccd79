"""Alerts on the budget of a policy."""

from __future__ import annotations

import math

from fedemb.reports.alerts.alert import Alert
from fedemb.steps.watch_budget.view import BudgetView


def budget_alerts(view: BudgetView, below: float | None) -> list[Alert]:
    """Returns an alert for each block with too little budget, and one if schedules pass the cap."""
    least = 0.0 if below is None else below
    alerts: list[Alert] = []
    for row in view.blocks:
        if not row.remaining >= least:
            facts = {
                "epsilon_remaining": row.remaining if math.isfinite(row.remaining) else None,
                "epsilon_charged": row.total if math.isfinite(row.total) else None,
                "epsilon_cap": view.cap,
                "threshold": least,
            }
            title = f"Privacy budget of block {row.block} is below {least:g}"
            if row.remaining < 0:
                title = f"Privacy budget of block {row.block} is above its cap"
            alerts.append(Alert("budget.low", view.policy_id, row.block, title, view.time, facts))
    first = view.first_reached
    if first is not None and first.forecast is not None:
        found = first.forecast
        alerts.append(
            Alert(
                "budget.cap_forecast",
                view.policy_id,
                first.block,
                f"Block {first.block}: {found.sentence()}",
                view.time,
                {
                    "schedule": found.schedule,
                    "week": found.week,
                    "runs_fitting": found.fitting,
                    "runs_scheduled": found.runs,
                    "epsilon_cap": view.cap,
                },
            )
        )
    return alerts
