"""KFP face of pretrain_public."""

from kfp import dsl

from fedemb.steps.step import step


@step("trainer")
def pretrain_public(model: str, pretraining: str, seed: int, pretrained: dsl.Output[dsl.Model]):
    """Trains the backbone on public images, imports one, or draws initial weights."""
    from pathlib import Path

    from fedemb.config import ModelConfig, PretrainingConfig
    from fedemb.steps.pretrain_public.pretrain import run
    from fedemb.steps.step import step_process

    with step_process("pretrain_public"):
        card = run(
            ModelConfig.model_validate_json(model),
            PretrainingConfig.model_validate_json(pretraining),
            seed=seed,
            output_dir=Path(pretrained.path),
        )
        pretrained.metadata.update(weights_sha=card["weights_sha"], licence=card["licence"])
