"""KFP face of plan_privacy."""

from kfp import dsl

from fedemb.steps.step import step


@step("cpu")
def plan_privacy(config: str, privacy_plan: dsl.Output[dsl.Artifact]):
    """Prices the mechanism before anything runs."""
    from pathlib import Path

    from fedemb.config import RunConfig
    from fedemb.steps.plan_privacy.plan import run
    from fedemb.steps.step import step_process

    with step_process("plan_privacy"):
        plan = run(RunConfig.model_validate_json(config), Path(privacy_plan.path))
        guarantee = plan["guarantee"]
        privacy_plan.metadata.update(
            {key: guarantee[key] for key in ("epsilon", "delta", "accountant")},
            plan_sha=plan["plan_sha"],
        )
