"""The plan of a run, priced before it starts, and the checks that refuse a run before its charge.

The plan is public: it contains no data and no secrets, and every later step compares its operations
with the plan.
"""

from __future__ import annotations

import math

from fedemb.config import RunConfig
from fedemb.config.run import config_digest
from fedemb.documents.plan import PrivacyPlan
from fedemb.errors import ConfigError
from fedemb.foundation.document import Fields
from fedemb.ledger import Charge, charged_content, series_of, terms_of
from fedemb.ledger.budget import spent
from fedemb.privacy.accounting import library_version, supports
from fedemb.privacy.guarantee import event_to_json
from fedemb.privacy.mechanism import MechanismPlan
from fedemb.privacy.planning import Projection, project
from fedemb.privacy.prices import figures, guarantee_of
from fedemb.privacy.registry import plan_mechanism


def document(config: RunConfig) -> PrivacyPlan:
    """Returns the content of the plan without writing it; see `run`."""
    plan = plan_mechanism(config)
    policy = config.policy
    check_composition(config, plan)
    guarantee = guarantee_of(plan, policy.delta)
    fields: Fields = {
        "config_sha": config_digest(config),
        "purpose": config.purpose,
        "plan": plan.to_json(),
        "backend": config.training.backend,
        "event": event_to_json(plan.event()),
        "relation": plan.relation.name,
        "guarantee": guarantee.to_json(),
        **figures(plan, policy.delta),
        "users_lower_bound": policy.users_lower_bound,
        "projections": [
            projection.to_json() for projection in _projections(plan, config, policy.delta)
        ],
        "accounting_library": f"dp-accounting {library_version()}",
    }
    return PrivacyPlan.of_fields(fields)


def check_composition(config: RunConfig, plan: MechanismPlan) -> None:
    """Rejects a release if its policy cannot compose the privacy loss of its runs.

    Raises:
      ConfigError: the policy adds Rényi divergences, and the mechanism has none.
    """
    summed = config.policy.composition == "renyi" and config.purpose == "release"
    if summed and plan.private and not supports(plan.event(), plan.relation, "rdp"):
        raise ConfigError(
            "policy.composition=renyi adds up the Rényi divergences of runs, and "
            f"{plan.kind} is priced by PLD alone; set policy.composition: planned"
        )


def check_first_run(config: RunConfig) -> None:
    """Rejects a release that costs more than its own policy's cap, alone or with all planned runs.

    Called before any training, and before a policy with a permanent cap is created.

    Raises:
      ConfigError: the run, or the series of planned runs, exceeds the cap.
    """
    plan, policy = plan_mechanism(config), config.policy
    if config.purpose != "release" or not plan.private:
        return
    check_composition(config, plan)
    terms = terms_of(config, series_of(config, plan))
    charge = Charge.planned(charged_content(config, plan))
    for runs in sorted({1, terms.series.runs if terms.series else 1}):
        total = spent(terms, [charge] * runs)
        if not total.epsilon <= policy.epsilon_cap:
            what = "One run costs" if runs == 1 else f"The {runs} planned runs cost together"
            way = "as planned" if total.method == "planned_series" else "by the Rényi filter"
            known = math.isfinite(total.epsilon)
            price = f"epsilon={total.epsilon:.4g} ({way})" if known else "more than can be priced"
            raise ConfigError(
                f"{what} {price}, above policy.epsilon_cap={policy.epsilon_cap:g}, the lifetime "
                f"budget of policy {policy.policy_id!r}. Raise mechanism.noise_multiplier, lower "
                "mechanism.rounds or policy.planned_runs, or raise the cap."
            )


def _projections(plan: MechanismPlan, config: RunConfig, delta: float) -> list[Projection]:
    population = config.policy.users_lower_bound
    if not plan.private:
        return []
    return [project(plan, population, other, delta) for other in config.policy.certify_at]
