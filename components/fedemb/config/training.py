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
from fedemb.foundation.runtime_env import Backend
from fedemb.foundation.section import Address, Section


class ModelConfig(Section):
    """The backbone and what it sees."""

    backbone: str = "resnet8"
    """Name of a backbone in `embedding/backbones/`, or `module:function` of your own. Several with
    a plus between them stand side by side, features joined: `scatter_linear+resnet8`."""
    embedding_dim: Annotated[int, Field(ge=2, le=65536)] = 128
    """Length of the embedding."""
    projection: bool = True
    """A dense layer to `embedding_dim` after the pooled features; false: they are the embedding."""
    projection_units: Annotated[int, Field(ge=0, le=65536)] = 0
    """Width of a second layer (ReLU) before that one; 0: there is none."""
    norm_groups: NonNegativeInt | None = None
    """Groups of each normalisation; 0: none at all; null: what the backbone's authors have."""
    weight_standardization: Literal["none", "plain", "gain"] | None = None
    """Kernels with mean 0 and norm 1 per channel, or times a trained gain; null: the authors'."""
    whitened_directions: Annotated[int, Field(ge=0, le=4096)] = 0
    """Scattering nets and `resnet8_wide`: largest directions of features that are brought to the
    size of the next one, by constants of public or generated images; fewer than such images. 0:
    scattering normalises groups of each image by themselves."""
    mirrored: bool = False
    """Features that an image shares with its mirror image, where left and right do not matter: of
    scattering nets half as many, of `resnet8_wide` the mean of both, at twice the time."""
    classes: tuple[Annotated[str, Field(pattern=r"^[\w .()+/-]{1,64}$")], ...] = ()
    """`task: classification`: the classes, a public list, in the order of the outputs: letters,
    digits, blanks and `.()+/-`, 64 at most. Images of other classes are
    dropped and counted in private."""
    head_init: Literal["zeros", "glorot"] = "zeros"
    """Where the layer of a classifier that gives the classes starts."""
    scale_norm: bool = False
    """Another normalisation after each residual sum (ScaleNorm, arXiv 2203.00324)."""
    image_size: Annotated[int, Field(ge=8, le=1024)] = 28
    """Height and width in pixels."""
    channels: Literal[1, 3] = 1
    """1 grey, 3 RGB."""
    aspect_ratio: Literal["squash", "letterbox"] = "squash"
    """How a photo becomes a square: stretched, or whole with grey beside it."""
    trainable: Literal[
        "all",
        "head",
        "norm_only",
        "last_block",
        "projection",
        "conv_frozen",
        "first_blocks_frozen",
    ] = "all"
    """Which named group of variables private training may change; the head of a classifier trains
    with each of them, and alone with `head`."""


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
    """None trains on the images as they are; with `model.trainable: projection` they then pass the
    frozen layers once, and not in every local step."""


class UnitGradientConfig(Section):
    """DP-SGD: what one unit (a user, or an image) brings to a round, before it is clipped."""

    images_per_unit: Annotated[int, Field(ge=1, le=1024)] = 1
    """Images of one unit in one round, at most, in keyed order; their gradients are averaged."""
    microbatch: Annotated[int, Field(ge=1, le=4096)] = 64
    """Units computed side by side. Part of what is reserved: other sizes give other bits. Memory
    grows with it, 12 bytes for each unit and trained weight, and not with the batch."""
    views: Annotated[int, Field(ge=1, le=64)] = 1
    """Augmented copies of each image (K), averaged before the clip: free of charge."""
    flip: bool = False
    """Mirror each view left-right with probability one half."""
    crop_padding: Annotated[int, Field(ge=0, le=64)] = 0
    """Shift each view by up to so many pixels either way; the border is mirrored."""
    automatic_clip: PositiveFloat | None = None
    """Bring every record to just below the clip, whatever its length; the number is the floor under
    the length (gamma). Null: only what is longer than the clip is shortened."""


class ServerConfig(Section):
    """What the server does with the noised mean update: post-processing, free of charge."""

    optimizer: Literal["sgd", "adam", "lamb"] = "sgd"
    """Rule that applies the noised mean update; `lamb` scales Adam's step of each tensor to the
    length of the tensor (arXiv 1904.00962)."""
    learning_rate: PositiveFloat = 0.5
    """Step along the noised mean update."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """SGD momentum, or beta_1 of Adam and LAMB."""
    nesterov: bool = False
    """SGD only: momentum looks one step ahead."""
    weight_decay: NonNegativeFloat = 0.0
    """Each round takes this share times the learning rate off the weights. No data is in it, so it
    stands outside the clip."""
    rescale_to_unit_norm: bool = False
    """Divide the noised mean by the clip, so that the learning rate does not depend on it."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """Decay of the learning rate over all rounds."""
    warmup_rounds: NonNegativeInt = 0
    """Linear warm-up before the schedule."""
    ema_decay: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Average of the weights that is released; 0 releases the last weights."""
    other_ema_decays: tuple[Annotated[float, Field(ge=0, lt=1)], ...] = ()
    """Classifiers only: more averages, measured beside the released one, free of charge. To choose
    one by these figures is tuning on the units that measure it."""
    ridge: PositiveFloat = 1.0
    """Least squares only: what is added to each eigenvalue, times the noise's standard deviation
    and the square root of the number of features."""


class TrainingConfig(Section):
    """The training algorithm. Rounds, clip and noise belong to `mechanism`."""

    algorithm: Literal["dp_fedemb", "dp_fedavg", "dp_sgd", "centralized"] = "dp_fedemb"
    """`dp_sgd` sums one gradient of each unit, for `task: classification`; `dp_fedavg` shares its
    head (and clips and noises it); `centralized` is a baseline: it needs `purpose: simulation`,
    a mechanism without noise and `rounds: 1`."""
    backend: Backend = "tensorflow"
    """What Keras computes gradients with in the trainer; `centralized` takes `tensorflow` alone. An
    attempt stays on the one it began with; the model loads on both."""
    local: LocalTrainingConfig = LocalTrainingConfig()
    """What a virtual client does: all algorithms but `dp_sgd`."""
    unit_gradient: UnitGradientConfig = UnitGradientConfig()
    """What a unit does: `dp_sgd` alone."""
    server: ServerConfig = ServerConfig()
    seed: NonNegativeInt = 0
    """Initial weights, shuffles, augmentation, heads. Never noise, never sampling."""
    checkpoint_every: PositiveInt = 1
    """Rounds between checkpoints; 1 resumes with no lost work."""
    parallel_clients: NonNegativeInt = 0
    """Virtual clients trained side by side; 0: one per core or device. On JAX side by side on each
    device, 0: eight; other numbers give other bits there, and take other memory."""
    mixed_precision: bool = False
    """bfloat16 local training; clipping and sums stay in full precision."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.backend == "jax" and self.algorithm == "centralized":
            raise ValueError(
                "training.backend=jax runs private rounds, got training.algorithm=centralized; set "
                "training.backend: tensorflow"
            )
        if self.server.other_ema_decays and self.algorithm != "dp_sgd":
            raise ValueError(
                "training.server.other_ema_decays names averages that evaluate_classifier measures,"
                f" got training.algorithm={self.algorithm}; leave it empty"
            )
        return self


class PretrainingConfig(Section):
    """Public start of the backbone."""

    kind: Literal["none", "supervised", "simclr", "random_process", "import"] = "none"
    """No start, classes, self-supervision without labels, generated images (no public data at all),
    or a model file."""
    random_images: Annotated[int, Field(ge=64, le=1_000_000)] = 2000
    """`random_process` only: images to draw."""
    random_laws: Annotated[int, Field(ge=2, le=10_000)] = 50
    """`random_process` only: laws of colour and shape, told apart as classes are."""
    source: SourceConfig | None = None
    """Public images; images found here are dropped from the private side."""
    epochs: PositiveInt = 10
    """Passes over the public images; of the first training, with `doublings`."""
    doublings: Annotated[int, Field(ge=0, le=6)] = 0
    """`supervised` only. At most so often: train from the start with twice as many epochs, as long
    as that raises recall on a tenth of the public classes, which then train nothing. 0: train
    once."""
    batch_size: PositiveInt = 64
    """Public images per step."""
    learning_rate: PositiveFloat = 0.05
    """Peak learning rate; decays by a cosine."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """SGD momentum."""
    weight_decay: NonNegativeFloat = 0.0
    """Share of each kernel that is added to its gradient; scales and offsets have none."""
    mixed_precision: bool = False
    """Compute in bfloat16: several times as fast where a processor has instructions for it."""
    loss: LossConfig = LossConfig()
    """Loss of supervised pretraining."""
    temperature: PositiveFloat = 0.2
    """SimCLR only."""
    augmentation: AugmentationConfig | None = AugmentationConfig()
    """Public augmentation; null trains on the images as they are."""
    import_path: Address | None = None
    """`import` only: a .keras file with whitelisted layers. With `model.trainable: projection` one
    that does not end in a projection to `embedding_dim` gets one, and that alone trains."""
    import_pixels: Literal["-1..1", "0..1", "0..255", "imagenet", "caffe"] = "-1..1"
    """`import` only: pixels the file was trained on. Of Keras' applications: `-1..1` MobileNet,
    ResNetV2, Xception and Inception; `0..255` MobileNetV3 and EfficientNet; `imagenet` (mean and
    deviation) DenseNet; `caffe` (BGR less its mean) ResNet and VGG."""
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
        if self.doublings and self.kind != "supervised":
            raise ValueError(
                f"pretraining.doublings={self.doublings} goes by recall on classes that do not "
                f"train, and pretraining.kind={self.kind} has none; take kind: supervised, or "
                "doublings: 0"
            )
        if self.kind == "import" and not self.import_path:
            raise ValueError("pretraining.kind=import needs pretraining.import_path, a .keras file")
        return self
