"""KFP face of pretrain_public."""

from kfp import dsl

from fedemb.step import step


@step("trainer")
def pretrain_public(public_start: str, pretrained: dsl.Output[dsl.Model]):
    """Trains the backbone on public images, imports one, or draws initial weights."""
    from fedemb.config import PublicStart
    from fedemb.step import step_process
    from fedemb.steps.pretrain_public.pretrain import run

    with step_process("pretrain_public", locals()) as context:
        card = run(PublicStart.model_validate_json(public_start), context.artifacts.pretrained)
        pretrained.metadata.update(weights_sha=card["weights_sha"], licence=card["licence"])
