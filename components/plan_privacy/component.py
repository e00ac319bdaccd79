"""KFP face of plan_privacy."""

from kfp import dsl

from fedemb.documents.artifacts import Public
from fedemb.runtime.step import Rights, step


@step(
    image="cpu",
    private=False,
    outputs={"config": Public, "privacy_plan": Public},
    rights=Rights(signing=("plan",)),
)
def plan_privacy(
    purpose: str,
    task: str,
    policy: str,
    mechanism: str,
    data: str,
    partition: str,
    model: str,
    pretraining: str,
    training: str,
    seed: int,
    tuning: str,
    evaluation: str,
    audit: str,
    release: str,
    rollback_anchor: str,
    keys: str,
    config: dsl.OutputPath(str),  # pyright: ignore[reportInvalidTypeForm] - kfp's form
    privacy_plan: dsl.Output[dsl.Artifact],
):
    """Checks the parameters, hands them on as one configuration, and prices its mechanism."""
    from pathlib import Path

    from fedemb.runtime.step import step_process
    from fedemb.steps.plan_privacy.plan import run

    with step_process("plan_privacy", locals()) as context:
        guarantee = run(context).body.guarantee
        Path(config).write_text(context.config.model_dump_json())
        privacy_plan.metadata.update(
            epsilon=guarantee.epsilon, delta=guarantee.delta, accountant=guarantee.accountant
        )
