"""`fedemb runs`: lists the runs of a folder, and prints the report of one."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedemb.errors import FedEmbError, InputError, Refused
from fedemb.pipelines.cli.options import RunsOption
from fedemb.pipelines.output import say, say_json

if TYPE_CHECKING:
    from fedemb.documents.plan import PrivacyPlan
    from fedemb.pipelines.run.directory import RunDirectory

NOT_SIGNED = "not signed or not readable, or its ledger is gone"
"""Instead of figures: one run whose files or ledger are not what they were hides no other."""


def show_runs(
    run: Annotated[
        Path | None, typer.Argument(help="Run whose report to print; default: list all runs.")
    ] = None,
    runs: RunsOption = Path("runs"),
    json_: Annotated[
        bool, typer.Option("--json", help="Print the privacy report of the run as JSON.")
    ] = False,
    open_: Annotated[
        bool, typer.Option("--open", help="Open the page in a browser; default: of the newest run.")
    ] = False,
    mlflow: Annotated[
        str | None,
        typer.Option(
            help="Write parameters, metrics and reports to MLflow: http(s):// address of a "
            "tracking server."
        ),
    ] = None,
) -> None:
    """List the runs of a folder with verdict, epsilon and gain, or print the report of one.

    Example: fedemb runs week-1 --open
    """
    from fedemb.pipelines.run.directory import RunDirectory
    from fedemb.pipelines.run.local import iter_runs

    found = [RunDirectory.open(run, runs)] if run else list(iter_runs(runs))
    if not found:
        raise InputError(f"no run in {runs}; start one with `fedemb run`")
    if mlflow is not None:
        from fedemb.pipelines.run.headline import tracked_run
        from fedemb.reports.mlflow import log_run

        say(*(f"mlflow: {run.run_id} is {log_run(tracked_run(run), mlflow)}" for run in found))
    elif run is None and not (open_ or json_):
        say(*runs_table(found))
    else:
        _report(found[0], json_=json_, open_=open_)


def _report(run: RunDirectory, *, json_: bool, open_: bool) -> None:
    if json_:
        from fedemb.pipelines.run.signed import signed_report

        signed = signed_report(run)
        if signed is None:
            raise InputError(f"run {run.run_id} has no privacy report yet; let it finish first")
        say_json(signed.json)
        return
    say(*run.read_state().closing_lines, f"report: {run.index}")
    if open_:
        import webbrowser

        if not webbrowser.open(run.index.as_uri()):
            say("no browser could be started here; open that page where there is one")


def runs_table(runs: Iterable[RunDirectory]) -> list[str]:
    """Returns the lines of a table in text, one row per run; `-`: not measured.

    The headline is the one of the run's page. Before the privacy report is made, the epsilon of
    this run is the planned one; a simulation's is a projection to the largest certified population.
    The gain, over the best start that needs no private data, is in points, with its 95 % interval.
    """
    rows = [("run", "headline", "epsilon, all runs", "epsilon, this run", "priced for", "gain")]
    for run in runs:
        try:
            rows.append((run.run_id, *_row(run)))
        except FedEmbError:
            rows.append((run.run_id, NOT_SIGNED, "?", "?", "?", "?"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def _row(run: RunDirectory) -> tuple[str, str, str, str, str]:
    from fedemb.documents.fields import points
    from fedemb.pipelines.run.headline import run_headline
    from fedemb.pipelines.run.signed import signed_utility

    found = run_headline(run)
    users, epsilon = _price(run)
    everything, this, _ = found.figures.rows()
    utility = signed_utility(run)
    gain = points(utility.body.gain) if utility and utility.body.gain else "-"
    return found.title, everything.value, epsilon if this.value == "-" else this.value, users, gain


def _price(run: RunDirectory) -> tuple[str, str]:
    from fedemb.pipelines.run.signed import signed_plan

    state = run.read_state()
    if (state.failed_step, state.exit_code) == ("reserve_budget", Refused.exit_code):
        return "-", "-"  # it spent nothing
    plan = signed_plan(run)
    return price(run.config().purpose, plan) if plan else ("-", "-")


def price(purpose: str, plan: PrivacyPlan) -> tuple[str, str]:
    """How many units a plan is priced for, and its epsilon."""
    from fedemb.privacy.accounting.units import count_of

    if purpose == "release":
        units = count_of(plan.users_lower_bound, plan.guarantee.unit)
        epsilon = plan.guarantee.epsilon
        return units, "infinite" if epsilon is None else f"{epsilon:.2f}"
    if not plan.projections:
        return "none (simulation)", "-"
    largest = max(plan.projections, key=lambda item: item.population)
    epsilon = "infinite" if largest.epsilon is None else f"{largest.epsilon:.2g}"
    return f"{largest.population:,} (projected)", epsilon
