"""`fedemb results`: the figures of finished runs as one Markdown table, for README and reviews."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from fedemb.errors import InputError
from fedemb.pipelines.run.directory import RunDirectory

HEADER = (
    "run",
    "users",
    "epsilon",
    "recall@FAR of the model",
    "public start",
    "untrained",
    "centralized",
    "utility drop",
    "seconds",
)


def results_table(runs: Iterable[RunDirectory]) -> list[str]:
    """Returns the lines of a Markdown table, one row per run.

    Recall is at the headline false accept rate, on identities that never trained, with its 95 %
    interval. The epsilon of a simulation is a projection to the largest certified population.

    Raises:
      InputError: a run has not been evaluated.
    """
    rows = [HEADER, ("---",) * len(HEADER), *(_row(run) for run in runs)]
    return ["| " + " | ".join(row) + " |" for row in rows]


def _row(run: RunDirectory) -> tuple[str, ...]:
    utility = run.document("utility_report")
    plan = run.document("privacy_plan")
    if utility is None or plan is None:
        raise InputError(f"run {run.run_id} has no utility report; finish it with --resume")
    config = run.config()
    far = f"{config.evaluation.false_accept_rates[0]:g}"
    population, epsilon = price(config.purpose, plan)
    others = (utility[name] for name in ("public_backbone", "untrained", "centralized"))
    seconds = sum(run.read_state().get("seconds", {}).values())
    return (
        run.run_id,
        population,
        epsilon,
        _recall(utility, far),
        *(_recall(other, far) for other in others),
        _drop(utility, far),
        f"{seconds:.0f}",
    )


def price(purpose: str, plan: Mapping[str, Any]) -> tuple[str, str]:
    """How many users a plan is priced for, and its epsilon."""
    if purpose == "release":
        return f"{plan['users_lower_bound']:,}", f"{plan['guarantee']['epsilon']:.2f}"
    projections = plan["projections"]
    if not projections:
        return "nobody (simulation)", "-"
    largest = max(projections, key=lambda item: item["population"])
    epsilon = largest["epsilon"]
    price = "infinite" if epsilon is None else f"{epsilon:.2g}"
    return f"{largest['population']:,} (projected)", price


def _drop(utility: Mapping[str, Any], far: str) -> str:
    """How much of the centralized baseline's recall is lost, relative."""
    if not utility["utility_drop"]:
        return "-"
    lost, whole = (
        utility["utility_drop"][far],
        utility["centralized"]["recall_at_far"][far]["value"],
    )
    low, high = (f"{100 * lost[end] / whole:.0f}" for end in ("low", "high"))
    return f"{100 * lost['value'] / whole:.0f} % [{low}, {high}]"


def _recall(measured: Mapping[str, Any] | None, far: str) -> str:
    if not measured or not measured.get("recall_at_far"):
        return "-"
    found = measured["recall_at_far"][far]
    return f"{found['value']:.3f} [{found['low']:.3f}, {found['high']:.3f}]"
