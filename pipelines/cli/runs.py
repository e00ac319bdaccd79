"""`fedemb runs`: the runs of a folder, and how each ended."""

from __future__ import annotations

from collections.abc import Iterable

from fedemb.errors import FedEmbError
from fedemb.pipelines.cli.results import price
from fedemb.pipelines.run.directory import RunDirectory
from fedemb.pipelines.run.signed import signed_plan, signed_utility


def runs_table(runs: Iterable[RunDirectory]) -> list[str]:
    """Returns the lines of a table in text, one row per run; `-` stands for what is not measured.

    A simulation's epsilon is as in `results_table`. The gain, over the best that was
    measured and needs no private data, is in points, with its 95 % interval.
    """
    rows = [("run", "verdict", "epsilon", "priced for", "gain over the best start")]
    for run in runs:
        users, epsilon = _price(run)
        rows.append((run.run_id, _verdict(run), epsilon, users, _gain(run)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


REFUSES = {"reserve_budget": "ledger", "gate_release": "gate"}
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


def _verdict(run: RunDirectory) -> str:
    """How the run stands, in a word or two."""
    state = run.read_state()
    match state.get("exit_code"):
        case 0 if run.config().purpose == "simulation":
            return "simulation"
        case 0:
            return "released"
        case 3:
            step = _refused_by(run)
            return f"refused by the {REFUSES[step]}" if step in REFUSES else f"refused in {step}"
        case _:
            return (
                f"stopped in {state['failed_step']}" if state.get("failed_step") else "unfinished"
            )
