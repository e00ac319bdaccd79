"""Computes the privacy guarantee of a run before the run starts.

The plan is public: it contains no data and no secrets, and every later step compares its operations
with the plan.
"""

from __future__ import annotations

import logging

from fedemb.config import RunConfig
from fedemb.config.digest import config_digest
from fedemb.documents.plan import PrivacyPlan
from fedemb.errors import ConfigError
from fedemb.foundation.document import Fields, Written
from fedemb.foundation.runtime_env import require_backend
from fedemb.keys.signatures import Signer, write_signed
from fedemb.ledger import Charge, charged_content, series_of, terms_of
from fedemb.ledger.budget import spent
from fedemb.privacy.accounting.accounting import library_version, supports
from fedemb.privacy.accounting.events import event_to_json
from fedemb.privacy.accounting.units import UNITS
from fedemb.privacy.mechanisms.mechanism import MechanismPlan
from fedemb.privacy.mechanisms.registry import plan_mechanism
from fedemb.privacy.planning.prices import figures, guarantee_of, privacy_curve
from fedemb.privacy.planning.projection import Projection, project
from fedemb.reports.privacy_words import guarantee_sentence
from fedemb.runtime.step_context import StepContext
from fedemb.steps.plan_privacy.noise_limits import check_noise, temperature_for_noise

_TOO_CERTAIN = 1.5
"""Maximum ratio of the temperature that the noise needs to the configured one."""

_log = logging.getLogger(__name__)


def run(context: StepContext) -> Written[PrivacyPlan]:
    """Writes `privacy_plan`, the plan of the configuration.

    Returns:
      The document: mechanism plan, event, relation, guarantee, the conservative and RDP figures,
      the (delta, epsilon) curve and projections to other populations.

    Raises:
      ConfigError: the mechanism cannot run on this partition, its policy cannot compose or pay its
          privacy loss, or the pipeline's images have another backend.
      UnsupportedAccounting: no accountant is valid for it.
    """
    require_backend(context.config.training.backend)
    check_first_run(context.config)
    check_noise(context.config)
    body = document(context.config)
    for warning in warnings(context.config).values():
        _log.warning("%s", warning)
    _log.info("planned: %s", guarantee_sentence(body.guarantee))
    signer = Signer.newest(context.keys, "plan")
    return write_signed(context.artifacts.privacy_plan, body, signer)


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
        "curve": privacy_curve(plan, policy.delta),
        "projections": [
            projection.to_json() for projection in _projections(plan, config, policy.delta)
        ],
        "warnings": sorted(warnings(config)),
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
    """Rejects a release that costs more than its own policy's cap.

    Called before any training, and before a policy with a permanent cap is created.

    Raises:
      ConfigError: the run exceeds the cap.
    """
    plan, policy = plan_mechanism(config), config.policy
    if config.purpose != "release" or not plan.private:
        return
    check_composition(config, plan)
    terms = terms_of(config, series_of(config, plan))
    first = spent(terms, [Charge.planned(charged_content(config, plan))])
    if not first.epsilon <= policy.epsilon_cap:
        way = "as planned" if first.method == "planned_series" else "by the Rényi filter"
        raise ConfigError(
            f"One run costs epsilon={first.epsilon:.4g} ({way}), above "
            f"policy.epsilon_cap={policy.epsilon_cap:g}, the lifetime budget of policy "
            f"{policy.policy_id!r}. Raise mechanism.noise_multiplier, lower mechanism.rounds, "
            "or raise the cap."
        )


def warnings(config: RunConfig) -> dict[str, str]:
    """Returns warnings about allowed but questionable settings: code to sentence."""
    plan, policy = plan_mechanism(config), config.policy
    delta, customary = policy.delta, policy.users_lower_bound**-1.1
    found: dict[str, str] = {}
    if delta > customary:
        found["delta_above_customary"] = (
            f"delta={delta:g} is above the customary users_lower_bound**-1.1={customary:.3g}; lower"
            f" it, as a mechanism may expose a share delta of its {UNITS[policy.unit].many}"
        )
    if plan.normalizer < 1:
        found["rounds_mostly_empty"] = (
            f"{plan.normalizer:.2g} virtual clients are expected in a round, so most rounds hold "
            "only noise; raise the sampling probability"
        )
    clients = config.partition.virtual_clients
    grouped = plan.private and not config.mechanism.samples_units
    if grouped and clients > policy.users_lower_bound:
        found["clients_mostly_empty"] = (
            f"partition.virtual_clients={clients:,} exceeds the {policy.users_lower_bound:,} users "
            "of policy.users_lower_bound, so many of them are empty, and the noise is larger "
            "relative to the update than printed; set fewer clients, with several users each"
        )
    divisor = temperature_for_noise(config, plan)
    if divisor is not None and divisor > _TOO_CERTAIN * config.model.temperature:
        found["probabilities_too_certain"] = (
            f"model.temperature is {config.model.temperature:g}, but the noise of this plan needs "
            f"{divisor:.3g}; set it, otherwise probabilities are too certain"
        )
    return found


def _projections(plan: MechanismPlan, config: RunConfig, delta: float) -> list[Projection]:
    population = config.policy.users_lower_bound
    if not plan.private:
        return []
    return [project(plan, population, other, delta) for other in config.policy.certify_at]
