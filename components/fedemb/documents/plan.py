"""Privacy plan: the mechanism and its price, computed before a run."""

from __future__ import annotations

from typing import ClassVar, Literal

from fedemb.documents.fields import (
    AnyJson,
    Comparison,
    Count,
    Delta,
    Epsilon,
    Guarantee,
    Name,
    Point,
    Purpose,
    Sha,
)
from fedemb.foundation.document import Document, Part
from fedemb.foundation.runtime_env import Backend


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
    """Written by plan_privacy; read with `plan_document`, which compares it with the config."""

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
    comparisons: list[Comparison]
    users_lower_bound: Count
    curve: list[Point]
    """Pairs of (delta, epsilon)."""
    projections: list[Projected]
    warnings: list[
        Literal[
            "clients_mostly_empty",
            "delta_above_customary",
            "probabilities_too_certain",
            "rounds_mostly_empty",
        ]
    ]
    accounting_library: Name
