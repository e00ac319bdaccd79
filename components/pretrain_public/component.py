"""KFP face of pretrain_public."""

from kfp import dsl

from fedemb.documents.artifacts import Public
from fedemb.runtime.step import Rights, step


@step(
    image="trainer",
    private=False,
    cached=True,
    resources="pretrain",
    outputs={"pretrained": Public},
    rights=Rights(input=("public",), signing=("pretrain",)),
)
def pretrain_public(
    model: str, pretraining: str, seed: int, keys: str, pretrained: dsl.Output[dsl.Model]
):
    """Trains the backbone on public images, imports one, or draws initial weights."""
    from fedemb.runtime.step import step_process
    from fedemb.steps.pretrain_public.pretrain import run

    with step_process("pretrain_public", locals()) as context:
        card = run(context.public_start, context.artifacts.pretrained, context.keys)
        pretrained.metadata.update(weights_sha=card["weights_sha"])
