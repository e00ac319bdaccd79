"""Tables of `fedemb results` (Markdown, for README and reviews) and `fedemb runs` (text)."""

from __future__ import annotations

from collections.abc import Iterable

from fedemb.documents.fields import Interval
from fedemb.documents.plan import PrivacyPlan
from fedemb.documents.utility import AnyUtility
from fedemb.errors import FedEmbError, InputError, Refused
from fedemb.pipelines.run.directory import RunDirectory
from fedemb.pipelines.run.headline import run_headline
from fedemb.pipelines.run.signed import signed_plan, signed_utility
from fedemb.privacy.accounting.units import count_of
from fedemb.reports.utility_words import deciding_start

HEADER = (
    "run",
    "priced for",
    "epsilon",
    "recall@FAR, or top-1, of the model",
    "public backbone",
    "untrained",
    "centralized",
    "utility drop",
    "gain in points, over the baseline that decided",
    "seconds",
)


def results_table(runs: Iterable[RunDirectory]) -> list[str]:
    """Returns the lines of a Markdown table, one row per run.

    Figures are on people who never trained, with 95 % intervals: recall at the headline false
    accept rate, or a classifier's top-1. The last column names the baseline of the gain, the best
    one that needs no private data. The epsilon of a simulation is a projection to the largest
    certified population.

    Raises:
      InputError: a run has not been evaluated.
    """
    rows = [HEADER, ("---",) * len(HEADER), *(_row(run) for run in runs)]
    return ["| " + " | ".join(row) + " |" for row in rows]


def _row(run: RunDirectory) -> tuple[str, ...]:
    signed, plan = signed_utility(run), signed_plan(run)
    if signed is None or plan is None:
        raise InputError(f"run {run.run_id} has no utility report; finish it with --resume")
    config, utility = run.config(), signed.body
    population, epsilon = price(config.purpose, plan)
    models = ("model", "public_backbone", "untrained", "centralized")
    seconds = sum(run.read_state().seconds.values())
    return (
        run.run_id,
        population,
        epsilon,
        *(_figure(utility.headline(name)) for name in models),
        _drop(utility),
        _gain(utility) + (f" over {deciding_start(utility)}" if utility.gain else ""),
        f"{seconds:.0f}",
    )


def price(purpose: str, plan: PrivacyPlan) -> tuple[str, str]:
    """How many units a plan is priced for, and its epsilon."""
    if purpose == "release":
        units = count_of(plan.users_lower_bound, plan.guarantee.unit)
        epsilon = plan.guarantee.epsilon
        return units, "infinite" if epsilon is None else f"{epsilon:.2f}"
    if not plan.projections:
        return "none (simulation)", "-"
    largest = max(plan.projections, key=lambda item: item.population)
    epsilon = "infinite" if largest.epsilon is None else f"{largest.epsilon:.2g}"
    return f"{largest.population:,} (projected)", epsilon


def _drop(utility: AnyUtility) -> str:
    """How much of the centralized baseline's figure is lost, relative."""
    gain, whole = utility.difference("centralized"), utility.headline("centralized")
    if gain is None or whole is None:
        return "-"
    lost = (-100 * part / whole.value for part in (gain.value, gain.high, gain.low))
    return "{:.0f} % [{:.0f}, {:.0f}]".format(*lost)


def _gain(utility: AnyUtility) -> str:
    """Returns the gain that the gate decides on, in points with its 95 % interval."""
    gain = utility.gain
    if gain is None:
        return "-"
    value, low, high = (f"{100 * x:+.1f}" for x in (gain.value, gain.low, gain.high))
    return f"{value} [{low}, {high}]"


def _figure(found: Interval | None) -> str:
    return "-" if found is None else f"{found.value:.3f} [{found.low:.3f}, {found.high:.3f}]"


NOT_SIGNED = "not signed, or its ledger is gone"
"""Instead of a figure: one run whose documents or ledger are not what they were hides no other."""


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
        if found.figures.recipes:
            price += f" (private search over {found.figures.recipes} recipes)"
        rows.append((run.run_id, found.title, everything.value, price, users, _gain_of(run)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def _price(run: RunDirectory) -> tuple[str, str]:
    state = run.read_state()
    if (state.failed_step, state.exit_code) == ("reserve_budget", Refused.exit_code):
        return "-", "-"  # it spent nothing
    try:
        plan = signed_plan(run)
    except FedEmbError:
        return "?", NOT_SIGNED
    return price(run.config().purpose, plan) if plan else ("-", "-")


def _gain_of(run: RunDirectory) -> str:
    try:
        utility = signed_utility(run)
    except FedEmbError:
        return NOT_SIGNED
    return "-" if utility is None else _gain(utility.body)
