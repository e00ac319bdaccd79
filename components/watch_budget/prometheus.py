"""Budget view in the Prometheus text format 0.0.4, for the textfile collector of node_exporter."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from fedemb.steps.watch_budget.view import BudgetView

METRICS = {
    "fedemb_budget_epsilon_cap": "Cap on the cumulative epsilon of a user block.",
    "fedemb_budget_epsilon_spent": "Epsilon of a user block by committed runs.",
    "fedemb_budget_epsilon_reserved": "Increase of epsilon by open reservations.",
    "fedemb_budget_epsilon_external": "Increase of epsilon by external charges.",
    "fedemb_budget_epsilon_remaining": "Cap less cumulative epsilon; negative above the cap.",
    "fedemb_budget_scheduled_runs": "Scheduled runs on a user block.",
    "fedemb_budget_scheduled_runs_fitting": "Scheduled runs before the first that does not fit.",
    "fedemb_budget_cap_reached_timestamp_seconds": "Time of the first scheduled run that does not "
    "fit, in Unix time; +Inf if all fit.",
    "fedemb_budget_ledger_sequence": "Number of the newest ledger record.",
    "fedemb_budget_view_timestamp_seconds": "Time of this view, in Unix time.",
}
"""Name -> help text. All metrics are gauges."""

_Sample = tuple[str, dict[str, str], float]


def prometheus_text(views: Sequence[BudgetView]) -> str:
    """Returns the views as a metrics file."""
    samples = [sample for view in views for sample in _samples(view)]
    lines: list[str] = []
    for name, text in METRICS.items():
        rows = [(labels, value) for found, labels, value in samples if found == name]
        if rows:
            lines += [f"# HELP {name} {text}", f"# TYPE {name} gauge"]
            lines += [f"{name}{{{_labels(labels)}}} {_number(value)}" for labels, value in rows]
    return "\n".join(lines) + "\n"


def _samples(view: BudgetView) -> Iterator[_Sample]:
    policy = {"policy": view.policy_id}
    yield "fedemb_budget_epsilon_cap", policy, view.cap
    yield "fedemb_budget_ledger_sequence", policy, view.sequence
    yield "fedemb_budget_view_timestamp_seconds", policy, view.time.timestamp()
    for row in view.blocks:
        labels = {**policy, "block": row.block}
        for part in ("spent", "reserved", "external", "remaining"):
            yield f"fedemb_budget_epsilon_{part}", labels, getattr(row, part)
        if row.forecast is not None:
            reached = row.forecast.reached
            yield "fedemb_budget_scheduled_runs", labels, row.forecast.runs
            yield "fedemb_budget_scheduled_runs_fitting", labels, row.forecast.fitting
            moment = reached.timestamp() if reached else math.inf
            yield "fedemb_budget_cap_reached_timestamp_seconds", labels, moment


def _labels(labels: dict[str, str]) -> str:
    escapes = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
    return ",".join(f'{name}="{value.translate(escapes)}"' for name, value in labels.items())


def _number(value: float) -> str:
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(value)
