"""Reading a privacy plan without trusting it: the mechanism is compared with the configuration.

Reserve, account, gate and release all start here; none of them takes an event, a relation or an
epsilon from the document.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from fedemb.config import RunConfig
from fedemb.documents.artifacts import config_digest, json_digest, read_json
from fedemb.errors import ArtifactError, PlanMismatch
from fedemb.privacy.mechanisms.mechanism import MechanismPlan, plan_mechanism

SCHEMA = "fedemb/privacy_plan/1"
_OPTIMISED = ("blt_decay", "blt_scale", "matrix_sensitivity")
"""Fields a planner may choose; `MechanismPlan` recomputes what they cost."""


def read_plan(path: Path, config: RunConfig) -> tuple[MechanismPlan, dict[str, Any]]:
    """Reads the plan of a configuration.

    Args:
      path: document written by plan_privacy.
      config: configuration of the run.

    Returns:
      The mechanism plan, and the document.

    Raises:
      ArtifactError: not a plan of this version.
      PlanMismatch: the plan is that of another configuration.
    """
    document = read_json(path, SCHEMA)
    return check_plan(document, config, config_digest(config)), document


def check_plan(document: dict[str, Any], config: RunConfig, config_sha: str) -> MechanismPlan:
    """Returns the mechanism of a plan document after comparing it with the configuration.

    Args:
      document: as written by plan_privacy.
      config: configuration of the run.
      config_sha: digest of the configuration as it was written, perhaps by an older version.

    Raises:
      ArtifactError: not a plan of this version.
      PlanMismatch: the plan is that of another configuration.
    """
    try:
        stored, plan_sha = document["plan"], document["plan_sha"]
        found = document["config_sha"]
    except KeyError as error:
        raise ArtifactError(f"the privacy plan lacks {error}; run plan_privacy again") from error
    if found != config_sha:
        raise PlanMismatch(
            "the privacy plan was made for another configuration; run plan_privacy again"
        )
    plan = MechanismPlan.from_json(stored)
    body = {key: value for key, value in document.items() if key not in ("schema", "plan_sha")}
    if json_digest(body) != plan_sha:
        raise PlanMismatch("the privacy plan is not what its digest says; run plan_privacy again")
    expected = _expected(plan, config)
    if plan != expected:
        changed = [
            field.name
            for field in dataclasses.fields(plan)
            if getattr(plan, field.name) != getattr(expected, field.name)
        ]
        raise PlanMismatch(
            f"the privacy plan has another {', '.join(changed)} than the configuration asks for; "
            "run plan_privacy again"
        )
    return plan


def _expected(plan: MechanismPlan, config: RunConfig) -> MechanismPlan:
    """What the configuration asks for; of `blt` the chosen noise is kept, its price is checked."""
    if config.mechanism.kind != "blt" or plan.kind != "blt":
        return plan_mechanism(config)
    mechanism = config.mechanism
    chosen = {name: getattr(plan, name) for name in _OPTIMISED}
    if len(plan.blt_decay or ()) != mechanism.buffers:
        raise PlanMismatch(
            f"the privacy plan has {len(plan.blt_decay or ())} noise buffers, the configuration "
            f"{mechanism.buffers}; run plan_privacy again"
        )
    return MechanismPlan(
        kind="blt",
        rounds=mechanism.rounds,
        l2_norm_clip=mechanism.l2_norm_clip,
        noise_multiplier=mechanism.noise_multiplier,
        virtual_clients=config.partition.virtual_clients,
        groupings=config.partition.groupings,
        clients_per_round=mechanism.clients_per_round,
        min_separation=mechanism.min_separation,
        max_participations=mechanism.max_participations,
        **chosen,
    )
