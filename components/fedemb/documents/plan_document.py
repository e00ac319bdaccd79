"""Reads a privacy plan without trusting it: the mechanism is compared with the configuration.

The steps reserve, account, gate and release use this module. None of them uses an event, a relation
or an epsilon from the document.
"""

from __future__ import annotations

from pathlib import Path

from fedemb.config import RunConfig
from fedemb.config.digest import config_digest
from fedemb.documents.plan import PrivacyPlan
from fedemb.errors import PlanMismatch
from fedemb.foundation.document import Written, read
from fedemb.privacy.mechanisms.mechanism import MechanismPlan
from fedemb.privacy.mechanisms.registry import plan_from_json


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
    ours, theirs = plan.to_json(), plan.expected(config.mechanism, config.public_numbers).to_json()
    if ours != theirs:
        changed = [name for name in ours if ours[name] != theirs[name]]
        raise PlanMismatch(
            f"the privacy plan has another {', '.join(changed)} than the configuration asks for; "
            "run plan_privacy again"
        )
    return plan
