"""`fedemb runs`: the runs of a folder, and how each ended."""

from __future__ import annotations

from collections.abc import Iterable

from fedemb.pipelines.cli.results import price
from fedemb.pipelines.run.directory import RunDirectory


def runs_table(runs: Iterable[RunDirectory]) -> list[str]:
    """Returns the lines of a table in text, one row per run; `-` stands for what is not measured.

    A simulation's epsilon is as in `results_table`. The gain is in points, with its 95 % interval.
    """
    rows = [("run", "verdict", "epsilon", "users", "gain over the public start")]
    for run in runs:
        plan, utility = run.document("privacy_plan"), run.utility()
        users, epsilon = price(run.config().purpose, plan) if plan else ("-", "-")
        gain, points = utility and utility.difference("public_backbone"), "-"
        if gain is not None:
            value, low, high = (f"{100 * x:+.1f}" for x in (gain.value, gain.low, gain.high))
            points = f"{value} [{low}, {high}]"
        rows.append((run.run_id, _verdict(run), epsilon, users, points))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def _verdict(run: RunDirectory) -> str:
    """How the run stands, in a word or two."""
    state = run.read_state()
    match state.get("exit_code"):
        case 0 if run.config().purpose == "simulation":
            return "simulation"
        case 0:
            return "released"
        case 3:
            return "refused"
        case _:
            return (
                f"stopped in {state['failed_step']}" if state.get("failed_step") else "unfinished"
            )
