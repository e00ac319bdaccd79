"""All steps of all pipelines, from where they are declared, and what follows from them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from fedemb.config import RunConfig
from fedemb.errors import InputError
from fedemb.pipelines.dp_fedemb import DP_FEDEMB
from fedemb.pipelines.dp_sgd import DP_SGD
from fedemb.pipelines.graph import Pipeline
from fedemb.runtime.step import Rights, Step, declared

PIPELINES = (DP_FEDEMB, DP_SGD)


def pipeline_of(config: RunConfig) -> Pipeline:
    """The pipeline that runs a configuration."""
    return DP_SGD if config.task == "classification" else DP_FEDEMB


def pipeline_named(name: str) -> Pipeline:
    """The pipeline of a name.

    Raises:
      InputError: no such pipeline exists.
    """
    found = {pipeline.name: pipeline for pipeline in PIPELINES}
    if name not in found:
        raise InputError(f"Unknown pipeline {name}. Use one of {', '.join(found)}.")
    return found[name]


@cache
def all_steps() -> Mapping[str, Step]:
    """Name -> declaration of every step, in the order of the pipelines."""
    steps = [step for pipeline in PIPELINES for step in pipeline.declared()]
    steps += [declared(pipeline.at_exit) for pipeline in PIPELINES if pipeline.at_exit]
    return {step.name: step for step in steps}


def rights_of_groups() -> dict[str, Rights]:
    """Group -> the rights of its steps, which are one service account's.

    Raises:
      ValueError: two steps of one group declare different rights.
    """
    groups: dict[str, Rights] = {}
    for step in all_steps().values():
        if groups.setdefault(step.group, step.rights) != step.rights:
            raise ValueError(
                f"{step.name} shares a service account with {', '.join(steps_of(step.group))} and "
                "must declare the same rights. Declare the same rights, or rename the step "
                "with another verb."
            )
    return groups


def steps_of(group: str) -> list[str]:
    """The names of the steps of a group."""
    return [step.name for step in all_steps().values() if step.group == group]


def key_claims(rights: Rights) -> dict[str, str]:
    """Claim -> folder of the key store: the volumes a step mounts where keys lie on volumes."""
    signing = {f"{SIGNING_CLAIM}-{role}": f"signing/{role}" for role in rights.signing}
    return {KIND_CLAIMS[kind]: kind for kind in rights.keys} | signing


KIND_CLAIMS = {
    "policy": "fedemb-policy-keys",
    "reservation": "fedemb-reservation-keys",
    "ledger": "fedemb-ledger-marks",
}
"""Kind of key -> its claim. A step that checks users against their commitment needs the key of the
policy, and cannot read the keys of reservations."""
SIGNING_CLAIM = "fedemb-keys"
