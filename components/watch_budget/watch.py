"""Reads the ledger of every policy, shows its budget, and sends alerts. It changes nothing."""

from __future__ import annotations

import json
import logging
import math
from datetime import UTC, datetime

from fedemb.errors import FedEmbError, LedgerError
from fedemb.foundation.files import write_bytes
from fedemb.ledger import open_ledger, policies, read_trust
from fedemb.reports.alerts.alert import Alert
from fedemb.reports.alerts.send import send_alerts
from fedemb.runtime.step_context import StepContext
from fedemb.steps.watch_budget.alerts import budget_alerts
from fedemb.steps.watch_budget.forecast import parse_planned, scheduled
from fedemb.steps.watch_budget.page import Viewed, budget_page
from fedemb.steps.watch_budget.view import budget_view
from fedemb.storage import open_store

_LOG = logging.getLogger(__name__)
SCHEMA = "fedemb/budget/1"


def run(context: StepContext, now: datetime | None = None) -> dict[str, float]:
    """Writes the budget of all policies as JSON and as a page, and sends alerts.

    A budget that cannot be read is an alert, too, because it may be near its cap.

    Returns: Metrics: the least remaining epsilon, and the fewest scheduled runs that fit.

    Raises:
      ConfigError: the schedules are not valid.
      LedgerError: the ledger is missing or broken.
      StorageError: the ledger cannot be read.
    """
    now = now or datetime.now(UTC).replace(microsecond=0)
    try:
        found = _read(context, now)
    except FedEmbError as error:
        title = f"Budget not readable: exit code {error.exit_code}"
        _send([Alert("budget.unknown", "all", "watch_budget", title, now)])
        raise
    body = {"schema": SCHEMA, "policies": [item[0].to_json() for item in found]}
    write_bytes(context.artifacts.budget, json.dumps(body, indent=1).encode())
    write_bytes(context.artifacts.budget_page, budget_page(found).encode())
    below = context.alert_below
    _send([alert for view, _, _ in found for alert in budget_alerts(view, below)])
    return _metrics(found)


def _read(context: StepContext, now: datetime) -> list[Viewed]:
    planned = parse_planned(context.schedules)
    store = open_store(context.ledger_uri)
    names = policies(store)
    if not names:
        raise LedgerError(f"No ledger in {store.uri}. Pass the root of the ledgers.")
    trust = read_trust(store)
    found: list[Viewed] = []
    for name in names:
        ledger = open_ledger(context.ledger_uri, name, trust=trust)
        runs = scheduled(planned, ledger, now)
        found.append(
            (budget_view(ledger, now, runs.due, runs.names, runs.problems), ledger, runs.due)
        )
    return found


def _send(alerts: list[Alert]) -> None:
    for problem in send_alerts(alerts):
        _LOG.warning("%s", problem)


def _metrics(found: list[Viewed]) -> dict[str, float]:
    rows = [row for view, _, _ in found for row in view.blocks]
    fits = [row.forecast.fitting for row in rows if row.forecast is not None]
    values = {
        "epsilon_remaining": min((row.remaining for row in rows), default=math.inf),
        "scheduled_runs_fitting": float(min(fits, default=0)) if fits else math.inf,
    }
    return {name: value for name, value in values.items() if math.isfinite(value)}
