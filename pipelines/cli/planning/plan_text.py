"""Text that `plan` prints."""

from __future__ import annotations

from pathlib import Path

from fedemb.config import RunConfig
from fedemb.gate.plan import warnings
from fedemb.pipelines.cli.planning.planned import Priced, series
from fedemb.privacy.planning.prices import finite
from fedemb.reports.privacy_words import BACKENDS, comparison, participants

PROTECTS_UP_TO = 20.0
"""Largest epsilon without a warning."""


def lines(config: RunConfig, found: Priced, output: Path | None) -> list[str]:
    """Returns the text of a price."""
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
