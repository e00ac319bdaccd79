"""Settings of backbone, public pretraining and private training.

The mechanism section defines rounds and noise.
"""

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
from fedemb.foundation.environment import Backend
from fedemb.foundation.section import Address, Section


class ModelConfig(Section):
    """Backbone and its input images."""

    backbone: str = "resnet8"
    """Name of a network (docs/explanation/method.md), or `module:function` for a network of your
    own."""
    embedding_dim: Annotated[int, Field(ge=2, le=65536)] = 128
    """Length of the embedding, 2 to 65536."""
    projection: bool = True
    """Dense layer to `embedding_dim` after the pooled features; false: the pooled features are the
    embedding."""
    norm_groups: NonNegativeInt | None = None
    """Number of groups of each normalisation layer; 0: no normalisation; null: the value of the
    backbone's authors."""
    whitened_directions: Annotated[int, Field(ge=0, le=4096)] = 0
    """Scattering networks and `pretraining.kind: import`: number of leading feature
    directions that are scaled to the size of the next direction. The constants come from public or
    drawn images; the number must be below the number of those images. 0: scattering networks
    normalise the groups of each image separately."""
    mirrored: bool = False
    """Whether features are the same for an image and its mirror image, for data where left and
    right do not matter. Scattering networks then have half as many features; an imported
    backbone averages both images and takes twice the time."""
    taps: tuple[Annotated[str, Field(pattern=r"^[\w./-]{1,128}$")], ...] = ()
    """`pretraining.kind: import` only: layers of the file whose outputs, averaged over positions,
    are joined into the features. Taps of `fedemb backbone show`, or names of layers. Empty: the
    output of the file."""
    square_root: bool = False
    """`pretraining.kind: import` only: whether features are replaced by their square roots, which
    keep the sign, and centred by public images. Classifiers also divide each channel by its
    standard deviation on them, embeddings all channels by one number."""
    principal_directions: Annotated[int, Field(ge=0, le=4096)] = 0
    """`pretraining.kind: import` only: number of leading feature directions that are kept and
    scaled to one size, by constants from the images of `pretraining.source`; all others are
    dropped. 0: all features are kept."""
    keep_public_features: Annotated[float, Field(ge=0, le=100)] = 0.0
    """`trainable: projection` only: length of the public features in the embedding. The embedding
    is the private projection of length 1, followed by the unchanged public features of this
    length; it is longer than `embedding_dim`. 0: only the projection."""
    classes: tuple[Annotated[str, Field(pattern=r"^[\w .()+/-]{1,64}$")], ...] = ()
    """`task: classification` only: public list of class names in the order of the outputs. A name
    has 1 to 64 letters, digits, underscores, blanks and `.()+/-`. Images of other classes are
    dropped; their count stays private."""
    head_init: Literal["zeros", "glorot"] = "zeros"
    """Initial weights of the output layer of a classifier."""
    image_size: Annotated[int, Field(ge=8, le=1024)] = 28
    """Image height and width in pixels, 8 to 1024."""
    channels: Literal[1, 3] = 1
    """Number of image channels: 1 for grey, 3 for RGB."""
    aspect_ratio: Literal["squash", "letterbox"] = "squash"
    """Conversion of a photo to a square. `squash`: stretched; `letterbox`: padded with grey."""
    trainable: Literal["all", "head", "projection", "conv_frozen"] = "all"
    """Named group of variables that private training may change. The head of a classifier is always
    trained; with `head`, only the head is trained."""

    @property
    def photo(self) -> tuple[int, int, Literal["squash", "letterbox"]]:
        """Settings of the model's `photos.PhotoReader`."""
        return self.image_size, self.channels, self.aspect_ratio

    @property
    def changes_features(self) -> bool:
        """Whether the features of an imported network differ from the output of its file."""
        return bool(
            self.taps or self.square_root or self.whitened_directions or self.principal_directions
        )


class LossConfig(Section):
    """Classification loss of local and public training."""

    kind: Literal["softmax", "normalized_softmax", "cosface"] = "normalized_softmax"
    """Loss function: softmax of plain or cosine logits, with or without margin."""
    scale: PositiveFloat = 16.0
    """Factor on cosine logits; unused by `softmax`."""
    margin: NonNegativeFloat = 0.2
    """Cosine margin of `cosface`."""


class AugmentationConfig(Section):
    """Random rotation, scale, shear and shift of a training image, at no privacy cost."""

    flip: bool = False
    """Whether to mirror left-right with probability 1/2."""


class LocalTrainingConfig(Section):
    """Local training of a virtual client on the broadcast backbone."""

    epochs: PositiveInt = 2
    """Number of passes over the virtual client's examples."""
    batch_size: PositiveInt = 32
    """Number of examples per local step."""
    max_examples_per_client: PositiveInt = 2048
    """Maximum number of examples of one virtual client per epoch, in keyed order."""
    client_learning_rate: NonNegativeFloat = 0.02
    """Learning rate of the backbone."""
    client_momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """SGD momentum; reset after each round."""
    head_learning_rate_scale: NonNegativeFloat = 100.0
    """Learning rate of the head divided by `client_learning_rate`."""
    head_init: Literal["glorot", "prototypes"] = "glorot"
    """Initial head. `glorot`: random; `prototypes`: normalised class means of the client's own
    embeddings."""
    refresh_prototypes: bool = False
    """Recompute the class means at the start of each local epoch; needs `head_init: prototypes`."""
    loss: LossConfig = LossConfig()
    """Local loss."""
    augmentation: AugmentationConfig | None = None
    """Augmentation; null: images are used unchanged. With null and `model.trainable: projection`,
    images pass the frozen layers once instead of in every local step."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.refresh_prototypes and self.head_init != "prototypes":
            raise ValueError(
                "training.local.refresh_prototypes recomputes class means, and "
                f"training.local.head_init={self.head_init}. Set head_init: prototypes, or "
                "refresh_prototypes: false."
            )
        return self


class UnitGradientConfig(Section):
    """DP-SGD: contribution of one unit (a user or an image) to a round, before clipping."""

    images_per_unit: Annotated[int, Field(ge=1, le=1024)] = 1
    """Maximum number of images of one unit per round, in keyed order. Their gradients are
    averaged."""
    microbatch: Annotated[int, Field(ge=1, le=4096)] = 64
    """Number of units computed in parallel. The reservation binds this value, because other sizes
    give other bits. Memory grows by 12 bytes per unit and trained weight, and not with the
    batch."""
    views: Annotated[int, Field(ge=1, le=64)] = 1
    """Number of augmented copies of each image (K), averaged before clipping, at no privacy
    cost."""
    flip: bool = False
    """Whether to mirror each view left-right with probability 1/2."""
    crop_padding: Annotated[int, Field(ge=0, le=64)] = 0
    """Maximum shift of each view in pixels, in both directions. The border is mirrored."""


class ServerConfig(Section):
    """Server step on the noised mean update: post-processing, at no privacy cost."""

    learning_rate: PositiveFloat = 0.5
    """Learning rate of the server step."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """SGD momentum."""
    rescale_to_unit_norm: bool = False
    """Whether to divide the noised mean by the clipping norm, so that the learning rate does not
    depend on the clipping norm."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """Decay of the learning rate over all rounds."""
    ema_decay: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay of the exponential moving average of the weights that is released; 0: the last weights
    are released."""
    ridge: PositiveFloat = 1.0
    """Heads and projections solved in one round only: ridge term added to each eigenvalue, in units
    of the noise standard deviation times the square root of the number of features."""


class TrainingConfig(Section):
    """Training algorithm. Rounds, clipping norm and noise are in `mechanism`."""

    algorithm: Literal["dp_fedemb", "dp_fedavg", "dp_sgd", "dp_covariance"] = "dp_fedemb"
    """Training algorithm. `dp_sgd` sums one gradient per unit, for `task: classification`;
    `dp_covariance` divides features by their noised covariance within users, in one round;
    `dp_fedavg` shares its head, with clipping and noise, and requires `purpose: simulation`."""
    backend: Backend = "tensorflow"
    """Keras backend of the trainer. The backend of an attempt cannot change. The model loads on
    both backends."""
    local: LocalTrainingConfig = LocalTrainingConfig()
    """Local training of a virtual client; all algorithms except `dp_sgd`."""
    unit_gradient: UnitGradientConfig = UnitGradientConfig()
    """Gradient of a unit; `dp_sgd` only."""
    server: ServerConfig = ServerConfig()
    seed: NonNegativeInt = 0
    """Seed of initial weights, shuffles, augmentation and heads. Not used for noise or sampling."""
    parallel_clients: NonNegativeInt = 0
    """Number of virtual clients trained in parallel; 0: one per core or device. On JAX the number
    is per device, and 0 means eight; other numbers give other bits and use other amounts of
    memory."""
    mixed_precision: bool = False
    """Whether to use bfloat16 in local training. Clipping and sums stay in full precision."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.backend == "jax" and self.algorithm == "dp_covariance":
            raise ValueError(
                "training.backend=jax does not support training.algorithm=dp_covariance; set "
                "training.backend: tensorflow"
            )
        return self


class PretrainingConfig(Section):
    """Public pretraining of the backbone."""

    kind: Literal["none", "supervised", "import"] = "none"
    """Kind of pretraining. `none`: no pretraining; `supervised`: public classes;
    `import`: a model file."""
    source: SourceConfig | None = None
    """Public images. Private images that also occur here are dropped. If they have all
    `model.classes`, the head of the classifier starts from a logistic regression on them."""
    constant_images: Annotated[int, Field(ge=2, le=100_000)] = 2000
    """Maximum number of public images that the constants of features are computed from; with `kind:
    none`, the number of images drawn for them."""
    epochs: PositiveInt = 10
    """Number of passes over the public images."""
    batch_size: PositiveInt = 64
    """Number of public images per step."""
    learning_rate: PositiveFloat = 0.05
    """Peak learning rate, with cosine decay."""
    mixed_precision: bool = False
    """Whether to compute in bfloat16: several times faster on processors with bfloat16
    instructions."""
    loss: LossConfig = LossConfig()
    """Loss of supervised pretraining."""
    augmentation: AugmentationConfig | None = AugmentationConfig()
    """Augmentation of public images; null: images are used unchanged."""
    import_path: Address | None = None
    """`import` only: a .keras file with whitelisted layers. With `model.trainable: projection`, a
    projection to `embedding_dim` is added if the file does not end in one, and only it is
    trained."""
    import_pixels: Literal["-1..1", "0..1", "0..255", "imagenet", "caffe"] = "-1..1"
    """`import` only: pixel range of the file's training data. In Keras applications: `-1..1` for
    MobileNet, ResNetV2, Xception and Inception; `0..255` for MobileNetV3 and EfficientNet;
    `imagenet` (mean and deviation) for DenseNet; `caffe` (BGR minus its mean) for ResNet and
    VGG."""
    licence: str = "unknown"
    """Licence of the public data or model, printed in report and model card."""
    provenance: str = ""
    """Origin of the public data or model."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.kind == "supervised" and self.source is None:
            raise ValueError(
                "pretraining.kind=supervised needs pretraining.source; name one, or kind: none"
            )
        if self.kind == "import" and not self.import_path:
            raise ValueError(
                "pretraining.kind=import needs a .keras file. Set pretraining.import_path."
            )
        return self
