"""The pipeline: from private images to a gated, signed release. Steps meet only in artifacts."""

from collections.abc import Callable
from typing import Any

from kfp import dsl

from fedemb.config import RunConfig
from fedemb.steps.account_privacy.component import account_privacy
from fedemb.steps.audit_privacy.component import audit_privacy
from fedemb.steps.evaluate_embeddings.component import evaluate_embeddings
from fedemb.steps.gate_release.component import gate_release
from fedemb.steps.partition_users.component import partition_users
from fedemb.steps.plan_privacy.component import plan_privacy
from fedemb.steps.pretrain_public.component import pretrain_public
from fedemb.steps.release_model.component import release_model
from fedemb.steps.reserve_budget.component import reserve_budget
from fedemb.steps.train_dp_fedemb.component import train_dp_fedemb

PIPELINE_NAME = "dp-fedemb"

STEPS = (
    "plan_privacy",
    "pretrain_public",
    "reserve_budget",
    "partition_users",
    "train_dp_fedemb",
    "evaluate_embeddings",
    "audit_privacy",
    "account_privacy",
    "gate_release",
    "release_model",
)
"""All steps in the order in which they run."""

PUBLIC_STEPS = ("pretrain_public",)
"""Steps whose results may be cached: they see public data only. Everything else is run, always."""


def build_pipeline(
    run_id: str = dsl.PIPELINE_JOB_ID_PLACEHOLDER,
    configure: Callable[[str, dsl.PipelineTask], None] | None = None,
    pipeline_config: Any = None,
) -> Any:
    """Returns the KFP pipeline.

    Args:
      run_id: idempotency key of the run. On a cluster the job's id, which is the default; a local
        run names its own, so that a resumed run finds its reservation and its rounds.
      configure: called with name and task of every step, for resources and node selection.
      pipeline_config: a `dsl.PipelineConfig`: options of the workflow, such as its time to live.
    """

    @dsl.pipeline(
        name=PIPELINE_NAME,
        description="Image embeddings with user-level privacy",
        pipeline_config=pipeline_config,
    )
    def dp_fedemb(  # noqa: PLR0917 - kfp passes them by name
        config: str,
        private_root: str,
        ledger: str,
        keys: str,
        releases: str,
        public_start: str,
        beam_options: list,
    ):
        plan = plan_privacy(config=config)
        public = pretrain_public(public_start=public_start)
        reservation = reserve_budget(
            config=config,
            run_id=run_id,
            ledger=ledger,
            keys=keys,
            privacy_plan=plan.outputs["privacy_plan"],
        )
        users = partition_users(
            config=config,
            run_id=run_id,
            private_root=private_root,
            keys=keys,
            beam_options=beam_options,
            reservation=reservation.outputs["reservation"],
        )
        private = {
            "users": users.outputs["users"],
            "pretrained": public.outputs["pretrained"],
        }
        agreed = {
            "privacy_plan": plan.outputs["privacy_plan"],
            "reservation": reservation.outputs["reservation"],
        }
        trained = train_dp_fedemb(
            config=config,
            run_id=run_id,
            private_root=private_root,
            ledger=ledger,
            keys=keys,
            **agreed,
            **private,
        )
        measured = {"model": trained.outputs["model"], **private}
        utility = evaluate_embeddings(
            config=config, run_id=run_id, private_root=private_root, **measured
        )
        audit = audit_privacy(config=config, run_id=run_id, private_root=private_root, **measured)
        findings = {
            "audit_report": audit.outputs["audit_report"],
            "utility_report": utility.outputs["utility_report"],
        }
        account = account_privacy(
            config=config, ledger=ledger, keys=keys, **agreed, **measured, **findings
        )
        gate = gate_release(
            config=config,
            ledger=ledger,
            keys=keys,
            users=users.outputs["users"],
            model=trained.outputs["model"],
            privacy_report=account.outputs["privacy_report"],
            **agreed,
            **findings,
        )
        release = release_model(
            config=config,
            ledger=ledger,
            keys=keys,
            releases=releases,
            verdict=gate.outputs["verdict"],
            privacy_report=account.outputs["privacy_report"],
            **agreed,
            **measured,
            **findings,
        )
        tasks = (plan, public, reservation, users, trained, utility, audit, account, gate, release)
        for name, task in zip(STEPS, tasks, strict=True):
            task.set_caching_options(name in PUBLIC_STEPS)
            if configure is not None:
                configure(name, task)

    return dp_fedemb


def pipeline_arguments(
    config: RunConfig,
    *,
    private_root: str,
    ledger: str,
    keys: str,
    releases: str,
    beam_options: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Returns the arguments of the pipeline for a configuration and its four stores.

    Sections travel as JSON text: kfp's structs know no null and turn 32 into 32.0.
    """
    return {
        "config": config.model_dump_json(),
        "private_root": private_root,
        "ledger": ledger,
        "keys": keys,
        "releases": releases,
        "public_start": config.public_start().model_dump_json(),
        "beam_options": list(beam_options),
    }
