"""`fedemb budget`: budget of every policy of a ledger, as text, JSON, HTML and metrics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedemb.errors import InputError
from fedemb.foundation.files import write_bytes
from fedemb.pipelines.cli.ledger_commands.ledger import MarksOption, TrustOption, check_marks
from fedemb.pipelines.cli.ledger_commands.ledger_write import LedgerOption, RollbackAnchorOption
from fedemb.pipelines.cli.option_groups import grouped
from fedemb.pipelines.cli.options import JsonOption
from fedemb.pipelines.output import say, say_json

if TYPE_CHECKING:
    from fedemb.steps.watch_budget.view import BudgetView


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """Formats of the view."""

    html: Annotated[Path | None, typer.Option(help="HTML page to write.")] = None
    prometheus: Annotated[
        Path | None, typer.Option(help="Prometheus text file to write, ending in .prom.")
    ] = None
    json_: JsonOption = False


@dataclass(frozen=True, kw_only=True)
class Alerts:
    """Alerts on the budget."""

    alert: Annotated[bool, typer.Option("--alert", help="Send alerts; see `fedemb alert`.")] = False
    alert_below: Annotated[
        float | None,
        typer.Option(help="Remaining epsilon below which a block is alerted. [0]", min=0),
    ] = None


@grouped
def budget(
    *,
    ledger: LedgerOption,
    policy: Annotated[
        str | None, typer.Option(help="Policy; default: all policies of the ledger.")
    ] = None,
    schedules: Annotated[
        Path | None, typer.Option(help="Folder of schedules for the forecast.")
    ] = None,
    outputs: Outputs,
    alerts: Alerts,
    trust: TrustOption = None,
    keys: MarksOption = None,
    rollback_anchor: RollbackAnchorOption = None,
) -> None:
    """Show spent, reserved, external and remaining budget, with a forecast.

    Example: fedemb budget --ledger policy/ledger --schedules schedules --html budget.html
    """
    from fedemb.keys.trust import TrustStore
    from fedemb.ledger import policies
    from fedemb.pipelines.cli.ledger_commands import ledger_summary
    from fedemb.pipelines.schedules.load import planned_runs
    from fedemb.steps.watch_budget.forecast import scheduled
    from fedemb.steps.watch_budget.view import budget_view
    from fedemb.storage import open_store

    names = [policy] if policy else policies(open_store(ledger))
    if not names:
        raise InputError(f"No ledger in {ledger}. Create one with `fedemb ledger init`.")
    now = datetime.now(UTC).replace(microsecond=0)
    planned = planned_runs(schedules) if schedules else []
    found = []
    for name in names:
        pinned = TrustStore.load(trust) if trust else None
        opened = ledger_summary.load(ledger, name, pinned, signatures=False)
        check_marks(opened, keys, rollback_anchor)
        runs = scheduled(planned, opened, now)
        view = budget_view(opened, now, runs.due, runs.names, runs.problems)
        found.append((view, opened, runs.due))
    views = [view for view, _, _ in found]
    if outputs.html:
        from fedemb.steps.watch_budget.page import budget_page

        write_bytes(outputs.html, budget_page(found).encode())
    if outputs.prometheus:
        from fedemb.steps.watch_budget.prometheus import prometheus_text

        write_bytes(outputs.prometheus, prometheus_text(views).encode())
    if alerts.alert:
        _alert(views, alerts.alert_below)
    if outputs.json_:
        say_json({"policies": [view.to_json() for view in views]})
        return
    for view in views:
        _print(view)
    for path in filter(None, (outputs.html, outputs.prometheus)):
        say(f"wrote {path}")


def _alert(views: Sequence[BudgetView], below: float | None) -> None:
    from fedemb.reports.alerts.send import destinations, send_alerts
    from fedemb.steps.watch_budget.alerts import budget_alerts

    places = destinations()
    if not places:
        raise InputError(
            "--alert needs a destination. Run `fedemb alert --help` for the variables."
        )
    for problem in send_alerts([a for view in views for a in budget_alerts(view, below)], places):
        say(f"note: {problem}", err=True)


def _print(view: BudgetView) -> None:
    from fedemb.steps.watch_budget.page import headline

    say(headline(view))
    if view.blocks:
        say("  block                spent    reserved external charged  remaining")
    for row in view.blocks:
        numbers = (row.spent, row.reserved, row.external, row.total, row.remaining)
        shown = " ".join(f"{value:<8.3g}" for value in numbers)
        say(f"  {row.block:<20} {shown}".rstrip())
        if row.forecast is not None:
            say(f"    {row.forecast.sentence()}")
    for problem in view.problems:
        say(f"  note: {problem}")
