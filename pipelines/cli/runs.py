"""`fedemb runs`: the runs of a folder, and how each ended."""

from __future__ import annotations

from collections.abc import Iterable

from fedemb.errors import FedEmbError
from fedemb.pipelines.cli.results import price
from fedemb.pipelines.run.directory import RunDirectory
from fedemb.pipelines.run.headline import run_headline
from fedemb.pipelines.run.signed import signed_plan, signed_utility


def runs_table(runs: Iterable[RunDirectory]) -> list[str]:
    """Returns the lines of a table in text, one row per run; `-`: not measured.

    The headline is the one of the run's page. Before the privacy report is made, the epsilon of
    this run is the planned one; a simulation's is as in `results_table`. The gain, over the best
    start that needs no private data, is in points, with its 95 % interval.
    """
    rows = [("run", "headline", "epsilon, all runs", "epsilon, this run", "priced for", "gain")]
    for run in runs:
        found = run_headline(run)
        users, epsilon = _price(run)
        everything, this, _ = found.figures.rows()
        price = epsilon if epsilon == NOT_SIGNED or this.value == "-" else this.value
        rows.append((run.run_id, found.title, everything.value, price, users, _gain(run)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


NOT_SIGNED = "not signed, or its ledger is gone"
"""Instead of a figure: one run whose documents or ledger are not what they were hides no other."""


def _price(run: RunDirectory) -> tuple[str, str]:
    if _refused_by(run) == "reserve_budget":
        return "-", "-"  # it spent nothing
    try:
        plan = signed_plan(run)
    except FedEmbError:
        return "?", NOT_SIGNED
    return price(run.config().purpose, plan) if plan else ("-", "-")


def _gain(run: RunDirectory) -> str:
    """In points."""
    try:
        utility = signed_utility(run)
    except FedEmbError:
        return NOT_SIGNED
    gain = utility and utility.body.gain
    if gain is None:
        return "-"
    value, low, high = (f"{100 * x:+.1f}" for x in (gain.value, gain.low, gain.high))
    return f"{value} [{low}, {high}]"


def _refused_by(run: RunDirectory) -> str | None:
    state = run.read_state()
    return state.get("failed_step") if state.get("exit_code") == 3 else None
