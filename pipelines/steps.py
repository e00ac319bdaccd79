"""The pipeline: from private images to a gated, signed release, and what follows from its steps."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from fedemb.pipelines.graph import Pipeline, Run
from fedemb.runtime.step import Rights, Step, declared


def flow(run: Run) -> None:
    """Runs the steps; each argument is an output of an earlier step."""
    plan = run("plan_privacy")
    config, privacy_plan = plan["config"], plan["privacy_plan"]
    pretrained = run("pretrain_public")["pretrained"]
    reservation = run(
        "reserve_budget", config=config, privacy_plan=privacy_plan, pretrained=pretrained
    )["reservation"]
    users = run("partition_users", config=config, reservation=reservation)["users"]
    model = run(
        "train_model",
        config=config,
        privacy_plan=privacy_plan,
        reservation=reservation,
        users=users,
        pretrained=pretrained,
    )["model"]
    measured = {"config": config, "users": users, "pretrained": pretrained, "model": model}
    utility = run("evaluate_model", **measured)["utility_report"]
    audit = run("audit_privacy", **measured)["audit_report"]
    evidence = {
        "config": config,
        "privacy_plan": privacy_plan,
        "reservation": reservation,
        "users": users,
        "model": model,
        "audit_report": audit,
        "utility_report": utility,
    }
    report = run("account_privacy", **evidence)["privacy_report"]
    verdict = run("gate_release", **evidence, privacy_report=report)["verdict"]
    run("release_model", **evidence, pretrained=pretrained, privacy_report=report, verdict=verdict)


PIPELINE = Pipeline(
    "fedemb",
    "Image embeddings and classifiers with differential privacy",
    flow,
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
