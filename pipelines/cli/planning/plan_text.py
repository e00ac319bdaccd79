"""Text that `plan`, `frontier` and `extrapolate` print."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fedemb.config import RunConfig
from fedemb.pipelines.cli.planning.planned import Priced, series
from fedemb.privacy.planning.frontier import CheaperRun
from fedemb.privacy.planning.prices import finite
from fedemb.reports.mechanism_text import comparison, participants
from fedemb.reports.privacy_report_words import BACKENDS
from fedemb.steps.plan_privacy.extrapolate import Extrapolation, Row
from fedemb.steps.plan_privacy.frontier import Frontier
from fedemb.steps.plan_privacy.plan import warnings

PROTECTS_UP_TO = 20.0
"""Largest epsilon without a warning."""


def lines(config: RunConfig, found: Priced, more: Sequence[str], output: Path | None) -> list[str]:
    """Returns the text of a price; `more` is what only this command prints, before the warnings."""
    plan, mechanism, epsilon = found.document.body, found.mechanism, finite(found.guarantee.epsilon)
    out = [str(found.guarantee), ""]
    noise = f"noise multiplier {mechanism.noise_multiplier:.4g}"
    out.append(f"{mechanism.kind}: {noise}, {participants(mechanism)}")
    out.append(f"  gradients by {BACKENDS[plan.backend]}")
    # At very much noise the grid of PLD costs more than the bound by Renyi divergences.
    renyi = plan.epsilon_rdp
    looser = renyi is not None and epsilon is not None and renyi > epsilon
    grouped = "epsilon if users are sampled before they are grouped (2C)"
    others = {
        grouped: None if plan.epsilon_conservative_2c == epsilon else plan.epsilon_conservative_2c,
        "epsilon by the Renyi accountant" + ", looser" * looser: renyi,
        "zCDP rho": plan.zcdp_rho,
    }
    out += [f"  {words}: {value:.4g}" for words, value in others.items() if value is not None]
    for other in plan.comparisons:
        out.append(f"  {comparison(mechanism, other.name)}: {_shown(other.epsilon)}")
    if planned := series(config):
        together, cap = planned["epsilon"], planned["cap"]
        price = "more than can be priced" if together is None else f"epsilon {together:.4g}"
        fits = together is not None and together <= cap
        limit = f"within the cap {cap:g}" if fits else f"above the cap {cap:g}: some runs would be "
        out.append(
            f"  all {planned['runs']} planned runs together: {price}, {limit}"
            + ("" if fits else "refused")
        )
    for item in plan.projections:
        at = "" if item.epsilon is None else f" at delta {item.delta:.2g}"
        out.append(
            f"projection, not a guarantee: simulated at {item.simulated_at:,} users, for "
            f"{item.population:,} users with {item.clients_per_round:.4g} clients a round and"
            f" noise multiplier {item.noise_multiplier:.4g} epsilon would be "
            f"{_shown(item.epsilon)}{at}"
        )
    out += more
    out += [f"warning: {text}" for text in [*warnings(config).values(), *_useless(found)]]
    return out if output is None else [*out, "", f"wrote {output}"]


def _shown(epsilon: float | None) -> str:
    return "infinite" if epsilon is None else f"{epsilon:.4g}"


def _useless(found: Priced) -> list[str]:
    epsilon = finite(found.guarantee.epsilon)
    if not found.mechanism.private:
        return [
            "the mechanism adds no noise and has no guarantee. Use it for baselines only; the gate "
            "denies it."
        ]
    if epsilon is not None and epsilon <= PROTECTS_UP_TO:
        return []
    return [
        f"epsilon is {_shown(epsilon)}, which protects no user. Use more noise (pass "
        "--target-epsilon), fewer rounds or more users"
        + (", or a larger delta." if epsilon is None else ".")
    ]


def simulation_lines(found: CheaperRun) -> list[str]:
    """Returns the text of `--simulate-at`."""
    settings = ", ".join(found["settings"])
    return ["", f"simulation at {found['share']}: {settings}", f"  {found['sentence']}"]


def frontier_lines(frontier: Frontier) -> list[str]:
    """Returns the table of `fedemb frontier`."""
    out = ["", f"settings of epsilon {frontier['target_epsilon']:g} with the smallest noise:"]
    timed = any(point["minutes"] is not None for point in frontier["points"])
    out.append(
        f"{'batch':>10}{'rounds':>10}{'noise':>10}{'noise/batch':>14}{'epochs':>10}"
        + f"{'minutes':>10}" * timed
    )
    for point in frontier["points"]:
        mark = "  full batch" if point["full_batch"] else ""
        minutes = f"{point['minutes']:>10.3g}" if timed else ""
        out.append(
            f"{point['batch']:>10,}{point['rounds']:>10,}{point['noise_multiplier']:>10.4g}"
            f"{point['noise_per_batch']:>14.3g}{point['epochs']:>10.4g}{minutes}{mark}"
        )
    for gain in frontier["full_batch"]:
        less = 1 - gain["noise"]
        out.append(
            f"{gain['rounds']:,} rounds: "
            + (
                f"full batch has {less:.1%} less noise on the mean than batch "
                f"{gain['smallest_batch']:,}, for {gain['work']:.3g} times the units"
                if gain["work"] > 1
                else "full batch is worth its cost: smaller batches have over 5 % more noise"
            )
        )
    return [*out, f"wrote {frontier['figure']}"]


def extrapolation_lines(extrapolation: Extrapolation) -> list[str]:
    """Returns the tables of `fedemb extrapolate`."""
    return [
        "",
        "Projections, not guarantees. Epsilon is an upper bound at delta = users ** -1.1, within",
        "0.1 % of the exact value. Correlated noise (tree, BLT) is scaled so that running sums of",
        "updates are as noisy as with independent noise.",
        "",
        "more users, compute and noise as planned:",
        *_rows(extrapolation["population"]),
        "",
        "more compute, same noise on the mean:",
        *_rows(extrapolation["compute"]),
        f"wrote {extrapolation['figure']}",
    ]


def _rows(points: Sequence[Row]) -> list[str]:
    """Returns one line per cohort with one column per mechanism; a dash if it cannot run."""
    kinds = list(dict.fromkeys(point["mechanism"] for point in points))
    cohorts = dict.fromkeys((point["population"], point["clients_per_round"]) for point in points)
    cells = {
        (
            point["population"],
            point["clients_per_round"],
            point["mechanism"],
        ): f"{point['epsilon']:#.3g} (noise {point['noise_multiplier']:.3g})"
        for point in points
    }
    out = [f"{'users':>15}{'clients/round':>15}" + "".join(f"{kind:>24}" for kind in kinds)]
    for users, clients in cohorts:
        row = "".join(f"{cells.get((users, clients, kind), '-'):>24}" for kind in kinds)
        out.append(f"{users:>15,}{clients:>15,}{row}")
    return out
