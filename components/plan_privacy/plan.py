"""Prices a run before anything of it happens.

The plan is public: it holds no data and no secrets, and every later step compares what it is about
to do with it.
"""

from __future__ import annotations

import logging
from typing import Any

from fedemb.config import RunConfig
from fedemb.documents.artifacts import config_digest
from fedemb.documents.plan import PrivacyPlan
from fedemb.keys.signatures import Signer, write_signed
from fedemb.privacy.accounting.accounting import library_version
from fedemb.privacy.accounting.events import event_to_json
from fedemb.privacy.mechanisms.mechanism import MechanismPlan
from fedemb.privacy.mechanisms.registry import plan_mechanism
from fedemb.privacy.planning.prices import figures, guarantee_of, privacy_curve
from fedemb.privacy.planning.projection import Projection, project
from fedemb.reports.privacy_report_words import guarantee_sentence
from fedemb.step_context import StepContext

_log = logging.getLogger(__name__)


def run(context: StepContext) -> dict[str, Any]:
    """Writes `privacy_plan`, the plan of the configuration.

    Returns:
      The document: mechanism plan, event, relation, guarantee, the conservative and RDP figures,
      the (delta, epsilon) curve and projections to other populations.

    Raises:
      ConfigError: the mechanism cannot run on this partition.
      UnsupportedAccounting: no accountant is valid for it.
    """
    body = document(context.config)
    for warning in warnings(context.config):
        _log.warning("%s", warning)
    _log.info("planned: %s", guarantee_sentence(body.guarantee))
    signer = Signer.newest(context.keys, "plan")
    return write_signed(context.artifacts.privacy_plan, body, signer).json


def document(config: RunConfig) -> PrivacyPlan:
    """The body of the plan, unwritten; see `run`."""
    plan = plan_mechanism(config)
    policy = config.policy
    guarantee = guarantee_of(plan, policy.delta)
    fields: dict[str, Any] = {
        "config_sha": config_digest(config),
        "purpose": config.purpose,
        "plan": plan.to_json(),
        "event": event_to_json(plan.event()),
        "relation": plan.relation.name,
        "guarantee": guarantee.to_json(),
        **figures(plan, policy.delta),
        "users_lower_bound": policy.users_lower_bound,
        "curve": privacy_curve(plan, policy.delta),
        "projections": [
            projection.to_json() for projection in _projections(plan, config, policy.delta)
        ],
        "warnings": ["delta_above_customary"] if warnings(config) else [],
        "accounting_library": f"dp-accounting {library_version()}",
    }
    return PrivacyPlan.of_fields(fields)


def warnings(config: RunConfig) -> list[str]:
    """What to say about a delta that is allowed but above the customary bound."""
    delta, customary = config.policy.delta, config.policy.users_lower_bound**-1.1
    if delta <= customary:
        return []
    return [
        f"delta={delta:g} is above the customary users_lower_bound**-1.1={customary:.3g}; lower it,"
        " as a mechanism may expose a share delta of its users"
    ]


def _projections(plan: MechanismPlan, config: RunConfig, delta: float) -> list[Projection]:
    population = config.policy.users_lower_bound
    if not plan.private:
        return []
    return [project(plan, population, other, delta) for other in config.policy.certify_at]
