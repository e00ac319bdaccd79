"""The backbone, its public start, and private training; rounds and noise are the mechanism's."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from fedemb.config.data import SourceConfig
from fedemb.config.section import Section


class ModelConfig(Section):
    """The backbone and what it sees."""

    backbone: str = "resnet8"
    """Name in the registry of `embedding/backbones.py`, or `module:function` of one's own."""
    embedding_dim: Annotated[int, Field(ge=2, le=8192)] = 128
    """Length of the embedding."""
    image_size: Annotated[int, Field(ge=8, le=1024)] = 28
    """Height and width in pixels."""
    channels: Literal[1, 3] = 1
    """1 grey, 3 RGB."""
    trainable: Literal["all", "norm_only", "last_block", "dense_only", "conv_frozen"] = "all"
    """Which named group of backbone variables private training may change."""


class LossConfig(Section):
    """Classification loss of local and public training."""

    kind: Literal["softmax", "normalized_softmax", "arcface", "cosface", "triplet"] = (
        "normalized_softmax"
    )
    """Softmax of plain or cosine logits, with or without margin; or batch-hard triplets."""
    scale: PositiveFloat = 16.0
    """Factor on cosine logits; unused by `softmax` and `triplet`."""
    margin: NonNegativeFloat = 0.2
    """Angular (arcface, radians), cosine (cosface) or distance (triplet) margin."""


class AugmentationConfig(Section):
    """Random affine copies of a training image; free of charge in privacy."""

    multiplicity: Annotated[int, Field(ge=1, le=64)] = 1
    """Augmented copies per image and visit, averaged in the loss."""
    rotation_degrees: Annotated[float, Field(ge=0, le=180)] = 10.0
    """Uniform in plus-minus this."""
    scale: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Relative, uniform in plus-minus this."""
    shear: Annotated[float, Field(ge=0, lt=1)] = 0.15
    """Uniform in plus-minus this."""
    translation: Annotated[float, Field(ge=0, le=0.5)] = 0.07
    """Share of the image size, uniform in plus-minus this."""
    flip: bool = False
    """Mirror left-right with probability one half."""


class LocalTrainingConfig(Section):
    """What a virtual client does with the broadcast backbone."""

    epochs: PositiveInt = 2
    """Passes over the virtual client's examples."""
    batch_size: PositiveInt = 32
    """Examples per local step."""
    max_examples_per_client: PositiveInt = 2048
    """Examples of one virtual client used per epoch, in keyed order."""
    optimizer: Literal["sgd", "adam"] = "sgd"
    """Local optimizer of backbone and head; its slots die with the round."""
    client_learning_rate: NonNegativeFloat = 0.02
    """Learning rate of the backbone."""
    client_momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """SGD momentum, or Adam's beta_1."""
    head_learning_rate_scale: NonNegativeFloat = 100.0
    """Learning rate of the head = client_learning_rate x this."""
    head_init: Literal["glorot", "prototypes"] = "glorot"
    """Fresh head: random, or normalised class means of the client's own embeddings."""
    reconstruction_steps: NonNegativeInt = 0
    """First this many steps train only the head, the rest only the backbone; 0 trains jointly."""
    loss: LossConfig = LossConfig()
    """Local loss."""
    augmentation: AugmentationConfig | None = None
    """None trains on the images as they are."""


class ServerConfig(Section):
    """What the server does with the noised mean update: post-processing, free of charge."""

    optimizer: Literal["sgd", "adam"] = "sgd"
    """Rule that applies the noised mean update."""
    learning_rate: PositiveFloat = 0.5
    """Step along the noised mean update."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """SGD momentum, or Adam's beta_1."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """Decay of the learning rate over all rounds."""
    warmup_rounds: NonNegativeInt = 0
    """Linear warm-up before the schedule."""
    ema_decay: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Average of the weights that is released; 0 releases the last weights."""


class TrainingConfig(Section):
    """The training algorithm. Rounds, clip and noise belong to `mechanism`."""

    algorithm: Literal["dp_fedemb", "dp_fedavg", "centralized"] = "dp_fedemb"
    """`dp_fedavg` shares its head (and clips and noises it); `centralized` is a
    baseline: it needs `purpose: simulation`, mechanism `not_private` and `rounds: 1`."""
    local: LocalTrainingConfig = LocalTrainingConfig()
    server: ServerConfig = ServerConfig()
    seed: NonNegativeInt = 0
    """Initial weights, shuffles, augmentation, heads. Never noise, never sampling."""
    checkpoint_every: PositiveInt = 1
    """Rounds between checkpoints; 1 resumes with no lost work."""
    parallel_clients: NonNegativeInt = 0
    """Virtual clients trained side by side; 0: one per core or device."""
    mixed_precision: bool = False
    """bfloat16 local training; clipping and sums stay in full precision."""


class PretrainingConfig(Section):
    """Public start of the backbone."""

    kind: Literal["none", "supervised", "simclr", "import"] = "none"
    """No start, classes, self-supervision without labels, or a model file."""
    source: SourceConfig | None = None
    """Public images; images found here are dropped from the private side."""
    epochs: PositiveInt = 10
    """Passes over the public images."""
    batch_size: PositiveInt = 64
    """Public images per step."""
    learning_rate: PositiveFloat = 0.05
    """Peak learning rate; decays by a cosine."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """SGD momentum."""
    loss: LossConfig = LossConfig()
    """Loss of supervised pretraining."""
    temperature: PositiveFloat = 0.2
    """SimCLR only."""
    augmentation: AugmentationConfig | None = AugmentationConfig()
    """Public augmentation; null trains on the images as they are."""
    import_path: str | None = None
    """`import` only: a .keras file with whitelisted layers."""
    licence: str = "unknown"
    """Licence of the public data or model, printed in report and model card."""
    provenance: str = ""
    """Where the public data or model comes from."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.kind in ("supervised", "simclr") and self.source is None:
            raise ValueError(
                f"pretraining.kind={self.kind} needs pretraining.source; name one, or kind: none"
            )
        if self.kind == "import" and not self.import_path:
            raise ValueError("pretraining.kind=import needs pretraining.import_path, a .keras file")
        return self
