"""The pipeline: from private images to a gated, signed release, and what follows from its steps."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from fedemb.pipelines.graph import Pipeline
from fedemb.runtime.step import Rights, Step, declared

PIPELINE = Pipeline(
    "fedemb",
    "Image embeddings and classifiers with differential privacy",
    (
        "plan_privacy",
        "pretrain_public",
        "reserve_budget",
        "partition_users",
        "train_model",
        "evaluate_model",
        "audit_privacy",
        "account_privacy",
        "gate_release",
        "release_model",
    ),
    at_exit="show_outcome",
)


@cache
def all_steps() -> Mapping[str, Step]:
    """Name -> declaration of every step, in the order of the pipeline."""
    names = [*PIPELINE.steps, PIPELINE.at_exit]
    return {name: declared(name) for name in names}


def rights_of_groups() -> dict[str, Rights]:
    """Group -> the rights of its step, which are its service account's."""
    return {step.group: step.rights for step in all_steps().values()}


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
