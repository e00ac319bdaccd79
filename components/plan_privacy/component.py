"""KFP face of plan_privacy."""

from kfp import dsl

from fedemb.documents.artifacts import Public
from fedemb.step import Rights, step


@step(
    image="cpu",
    private=False,
    outputs={"privacy_plan": Public},
    rights=Rights(signing=("plan",)),
)
def plan_privacy(config: str, keys: str, privacy_plan: dsl.Output[dsl.Artifact]):
    """Prices the mechanism before anything runs."""
    from fedemb.step import step_process
    from fedemb.steps.plan_privacy.plan import run

    with step_process("plan_privacy", locals()) as context:
        plan = run(context)
        guarantee = plan["guarantee"]
        privacy_plan.metadata.update(
            {key: guarantee[key] for key in ("epsilon", "delta", "accountant")}
        )
