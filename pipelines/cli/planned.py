"""From options to the configuration that is priced, and the figures that `plan` prints."""

from __future__ import annotations

from typing import NamedTuple

from fedemb.config import RunConfig
from fedemb.documents.plan import PrivacyPlan
from fedemb.foundation.document import Written, written
from fedemb.pipelines.cli.ledger_summary import planned_series
from fedemb.privacy.guarantee import PrivacyGuarantee
from fedemb.privacy.mechanism import MechanismPlan
from fedemb.privacy.planning import with_target_epsilon
from fedemb.privacy.prices import finite
from fedemb.privacy.registry import plan_from_json, plan_mechanism
from fedemb.release.plan import document
from fedemb.reports.privacy_text import BACKENDS, participants
from fedemb.training.noise_warnings import forecast, warnings


class Priced(NamedTuple):
    """A configuration with its unsigned plan document, the mechanism in it and its guarantee."""

    document: Written[PrivacyPlan]
    mechanism: MechanismPlan
    guarantee: PrivacyGuarantee


def priced(config: RunConfig) -> Priced:
    """Prices a configuration."""
    made = written(document(config))
    guarantee = PrivacyGuarantee.from_json(made.body.guarantee.model_dump())
    return Priced(made, plan_from_json(made.body.plan), guarantee)


def price_fields(config: RunConfig, found: Priced) -> dict[str, object]:
    """Returns the JSON that `plan` prints."""
    plan, mechanism, guarantee = found.document.body, found.mechanism, found.guarantee
    return {
        "mechanism": mechanism.kind,
        "backend": plan.backend,
        "epsilon": finite(guarantee.epsilon),
        "delta": guarantee.delta,
        "accountant": guarantee.accountant,
        "relation": guarantee.relation.name,
        "epsilon_conservative_2c": plan.epsilon_conservative_2c,
        "epsilon_rdp": plan.epsilon_rdp,
        "zcdp_rho": plan.zcdp_rho,
        "unit": mechanism.unit,
        "noise_multiplier": mechanism.noise_multiplier,
        "sampling_probability": mechanism.chance,
        "clients_per_round": mechanism.normalizer,
        "rounds": mechanism.rounds,
        "virtual_clients": mechanism.virtual_clients,
        "users_lower_bound": config.policy.users_lower_bound,
        "sentence": str(guarantee),
        "series": series(config),
        "projections": [one.model_dump() for one in plan.projections],
        "forecast": forecast(config),
        "warnings": list(warnings(config).values()),
        "plan_sha": mechanism.digest,
    }


def calibrated(config: RunConfig, target_epsilon: float) -> RunConfig:
    """Returns the configuration with the smallest noise for an epsilon.

    Args:
      config: the configuration.
      target_epsilon: bound on epsilon of all runs that the policy plans, together. A policy that
          composes by a Rényi filter plans no series, so the bound applies to one run.
    """
    policy = config.policy
    runs = policy.planned_runs if policy.composition == "planned" else 1
    found = with_target_epsilon(plan_mechanism(config), target_epsilon, policy.delta, runs=runs)
    return config.updated({"mechanism.noise_multiplier": found.noise_multiplier})


def series(config: RunConfig) -> dict[str, float | None] | None:
    """Returns number, epsilon and cap of all planned runs of the policy; None for a single run."""
    planned = planned_series(config) if config.policy.planned_runs > 1 else None
    if planned is None:
        return None
    return {"runs": planned[0], "epsilon": finite(planned[1]), "cap": config.policy.epsilon_cap}


PROTECTS_UP_TO = 20.0
"""Largest epsilon without a warning."""


def lines(config: RunConfig, found: Priced) -> list[str]:
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
    if planned := series(config):
        together, cap = planned["epsilon"], config.policy.epsilon_cap
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
    out.append(f"forecast: {forecast(config)}")
    out += [f"warning: {text}" for text in [*warnings(config).values(), *_useless(found)]]
    return out


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
