"""Privacy plan: the mechanism and its price, computed before a run."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from fedemb.config import RunConfig
from fedemb.config.run import config_digest
from fedemb.documents.fields import AnyJson, Count, Delta, Epsilon, Guarantee, Name, Purpose, Sha
from fedemb.errors import PlanMismatch
from fedemb.foundation.document import Document, Part, Written, read
from fedemb.foundation.environment import Backend
from fedemb.privacy.mechanism import MechanismPlan
from fedemb.privacy.registry import plan_from_json, plan_mechanism


class Projected(Part):
    """Cost of the plan for another number of users, not a guarantee; `Projection.to_json`."""

    simulated_at: Count
    population: Count
    virtual_clients: Count
    clients_per_round: float
    noise_multiplier: float
    delta: Delta
    epsilon: Epsilon
    compute_factor: float


class PrivacyPlan(Document):
    """Written by plan_privacy; read with `read_plan`, which compares it with the config."""

    kind: ClassVar[str] = "privacy_plan"
    role: ClassVar[str | None] = "plan"

    config_sha: Sha
    purpose: Purpose
    plan: AnyJson
    """`MechanismPlan.to_json()`."""
    backend: Backend
    event: AnyJson
    relation: Name
    guarantee: Guarantee
    epsilon_conservative_2c: Epsilon
    epsilon_rdp: Epsilon
    zcdp_rho: Epsilon
    users_lower_bound: Count
    projections: list[Projected]
    accounting_library: Name


def read_plan(path: Path, config: RunConfig) -> tuple[MechanismPlan, Written[PrivacyPlan]]:
    """Reads the plan of a configuration: the mechanism and its document.

    Raises:
      ArtifactError: the plan cannot be read.
      PlanMismatch: the plan belongs to another configuration.
    """
    document = read(path, PrivacyPlan)
    return check_plan(document.body, config), document


def check_plan(document: PrivacyPlan, config: RunConfig) -> MechanismPlan:
    """Returns the mechanism of a plan document after comparing it with the configuration.

    Raises:
      ArtifactError: the mechanism is not supported by this version.
      PlanMismatch: the plan belongs to another configuration.
    """
    if document.config_sha != config_digest(config):
        raise PlanMismatch(
            "the privacy plan was made for another configuration; run plan_privacy again"
        )
    plan = plan_from_json(document.plan)
    if plan.kind != config.mechanism.kind:
        raise PlanMismatch(
            f"the privacy plan is of mechanism {plan.kind}, the configuration asks for "
            f"{config.mechanism.kind}; run plan_privacy again"
        )
    if document.backend != config.training.backend:
        raise PlanMismatch(
            f"the privacy plan is of a training on {document.backend}, the configuration asks for "
            f"{config.training.backend}; run plan_privacy again"
        )
    ours, theirs = plan.to_json(), plan_mechanism(config).to_json()
    if ours != theirs:
        changed = [name for name in ours if ours[name] != theirs[name]]
        raise PlanMismatch(
            f"the privacy plan has another {', '.join(changed)} than the configuration asks for; "
            "run plan_privacy again"
        )
    return plan
