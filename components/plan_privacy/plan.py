"""Prices a run before anything of it happens.

The plan is public: it holds no data and no secrets, and every later step compares what it is about
to do with it.
"""

from __future__ import annotations

import logging
import math
from typing import Any

from fedemb.config import RunConfig
from fedemb.documents.artifacts import json_digest, write_json
from fedemb.privacy.accounting.accounting import curve, library_version, price, supports
from fedemb.privacy.accounting.events import event_to_json
from fedemb.privacy.accounting.guarantee import PrivacyGuarantee
from fedemb.privacy.mechanisms.mechanism import MechanismPlan, plan_mechanism
from fedemb.privacy.planning.projection import Projection, project
from fedemb.step_context import StepContext

SCHEMA = "fedemb/privacy_plan/1"
CURVE_DELTAS = tuple(10.0**-exponent for exponent in range(4, 11))
"""Deltas of the stored privacy curve, the plan's own apart."""

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
    write_json(context.artifacts.privacy_plan, SCHEMA, body)
    _log.info("planned: %s", body["guarantee"]["sentence"])
    return {"schema": SCHEMA, **body}


def document(config: RunConfig) -> dict[str, Any]:
    """The body of the plan, unwritten; see `run`."""
    plan = plan_mechanism(config)
    policy = config.policy
    warnings = delta_warnings(policy.delta, policy.users_lower_bound)
    for warning in warnings:
        _log.warning("%s", warning)
    guarantee = price(plan.event(), plan.relation, policy.delta, rounds=plan.rounds)
    body: dict[str, Any] = {
        "config_sha": json_digest(config.model_dump(mode="json")),
        "purpose": config.purpose,
        "plan": plan.to_json(),
        "event": event_to_json(plan.event()),
        "relation": plan.relation.name,
        "guarantee": guarantee.to_json(),
        **figures(plan, guarantee),
        "users_lower_bound": policy.users_lower_bound,
        "curve": [list(point) for point in _curve(plan, policy.delta)],
        "projections": [
            projection.to_json() for projection in _projections(plan, config, policy.delta)
        ],
        "warnings": warnings,
        "accounting_library": f"dp-accounting {library_version()}",
    }
    return {**body, "plan_sha": json_digest(body)}


def figures(plan: MechanismPlan, guarantee: PrivacyGuarantee) -> dict[str, float | None]:
    """Epsilon by the other readings: twice the clip, RDP, zCDP; null where there is none."""
    if not plan.private:
        return {"epsilon_conservative_2c": None, "epsilon_rdp": None, "zcdp_rho": None}
    delta = guarantee.delta
    event = plan.event()
    doubled = price(plan.conservative_event(), plan.conservative_relation, delta)
    renyi = (
        price(event, plan.relation, delta, "rdp").epsilon
        if supports(event, plan.relation, "rdp")
        else None
    )
    return {
        "epsilon_conservative_2c": finite(doubled.epsilon),
        "epsilon_rdp": None if renyi is None else finite(renyi),
        "zcdp_rho": plan.zcdp_rho,
    }


def delta_warnings(delta: float, users_lower_bound: int) -> list[str]:
    """What to say about a delta that is allowed but above the customary bound."""
    customary = users_lower_bound**-1.1
    if delta <= customary:
        return []
    return [
        f"delta={delta:g} is above the customary users_lower_bound**-1.1={customary:.3g}; lower it,"
        " as a mechanism may expose a share delta of its users"
    ]


def finite(value: float) -> float | None:
    """The number, or null for JSON where it is infinite."""
    return value if math.isfinite(value) else None


def _curve(plan: MechanismPlan, delta: float) -> list[tuple[float, float]]:
    if not plan.private:
        return []
    deltas = sorted({*CURVE_DELTAS, delta}, reverse=True)
    points = curve(plan.event(), plan.relation, deltas)
    return [(d, epsilon) for d, epsilon in points if math.isfinite(epsilon)]


def _projections(plan: MechanismPlan, config: RunConfig, delta: float) -> list[Projection]:
    population = config.policy.users_lower_bound
    if not plan.private:
        return []
    return [project(plan, population, other, delta) for other in config.policy.certify_at]
