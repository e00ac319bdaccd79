"""KFP face of plan_privacy."""

from kfp import dsl

from fedemb.step import step


@step("cpu")
def plan_privacy(config: str, privacy_plan: dsl.Output[dsl.Artifact]):
    """Prices the mechanism before anything runs."""
    from fedemb.step import step_process
    from fedemb.steps.plan_privacy.plan import run

    with step_process("plan_privacy", locals()) as context:
        plan = run(context)
        guarantee = plan["guarantee"]
        privacy_plan.metadata.update(
            {key: guarantee[key] for key in ("epsilon", "delta", "accountant")},
            plan_sha=plan["plan_sha"],
        )
