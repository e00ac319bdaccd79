"""Reading a privacy plan without trusting it: the mechanism is compared with the configuration.

Reserve, account, gate and release all start here; none of them takes an event, a relation or an
epsilon from the document.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedemb.config import RunConfig
from fedemb.documents.artifacts import config_digest, json_digest, read_json
from fedemb.errors import ArtifactError, PlanMismatch
from fedemb.privacy.mechanisms.mechanism import MechanismPlan
from fedemb.privacy.mechanisms.registry import plan_from_json, public_numbers

SCHEMA = "fedemb/privacy_plan/1"


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
    plan = plan_from_json(stored)
    body = {key: value for key, value in document.items() if key not in ("schema", "plan_sha")}
    if json_digest(body) != plan_sha:
        raise PlanMismatch("the privacy plan is not what its digest says; run plan_privacy again")
    if plan.kind != config.mechanism.kind:
        raise PlanMismatch(
            f"the privacy plan is of mechanism {plan.kind}, the configuration asks for "
            f"{config.mechanism.kind}; run plan_privacy again"
        )
    ours, theirs = plan.to_json(), plan.expected(config.mechanism, public_numbers(config)).to_json()
    if ours != theirs:
        changed = [name for name in ours if ours[name] != theirs[name]]
        raise PlanMismatch(
            f"the privacy plan has another {', '.join(changed)} than the configuration asks for; "
            "run plan_privacy again"
        )
    return plan
