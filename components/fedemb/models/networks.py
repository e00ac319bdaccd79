"""Building blocks of backbones: normalisation and the last layer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import cast

from fedemb.config import ModelConfig
from fedemb.errors import ConfigError
from fedemb.models.keras_backend import LayerMaker, Node
from fedemb.models.keras_backend import keras_layers as layers
from fedemb.models.layers import standardized_convolution, whitened_layer
from fedemb.models.scattering import PATHS, scattering_layer


def group_norm(
    x: Node, model: ModelConfig, name: str, groups: int, *, epsilon: float = 1e-5, **options: object
) -> Node:
    """Normalises each image by groups of its own channels; does nothing for 0 groups.

    Args:
      x: `[batch, height, width, channels]`.
      model: model configuration; `norm_groups` sets the groups.
      name: name of the layer.
      groups: the backbone's number of groups if the configuration sets none.
      epsilon: constant added to the variance under the root.
      options: options of the layer.

    Raises:
      ConfigError: the groups do not divide the channels.
    """
    wanted = groups if model.norm_groups is None else model.norm_groups
    if wanted == 0:
        return x
    if x.shape[-1] % wanted:
        raise ConfigError(
            f"model.norm_groups={wanted} does not divide the {x.shape[-1]} channels of {name}; take"
            " a divisor, or 0 for no normalisation"
        )
    return layers().GroupNormalization(groups=wanted, epsilon=epsilon, name=name, **options)(x)


def embedding(x: Node, model: ModelConfig) -> Node:
    """Returns the projection: a dense layer, or none if the features are the embedding.

    A projection that is trained alone has no bias, which would overfit to few users.

    Args:
      x: `[batch, features]`.
      model: model configuration with `projection` and `embedding_dim`.
    """
    if not model.projection:
        return x
    bias = model.trainable != "projection"
    return layers().Dense(model.embedding_dim, name="embedding", use_bias=bias)(x)


# The networks of `model.backbone`: from the papers' code, and for small images.
#
# Each function maps images `[batch, height, width, channels]` in [-1, 1] to embeddings. It may
# use group normalisation, never batch normalisation, which mixes the images of a batch.


Build = Callable[[Node, ModelConfig], Node]
"""Function from input tensor and settings to output tensor: the layers of a backbone."""
_GROUPS, _WIDE_GROUPS = 8, 16


def _lenet(x: Node, model: ModelConfig) -> Node:
    """Two 5x5 convolutions and one dense layer: 453,632 parameters at 28x28x1, 128."""
    for index, filters in enumerate((32, 64), start=1):
        conv = layers().Conv2D(
            filters, 5, padding="same", activation="relu", name=f"block{index}_conv"
        )
        x = layers().MaxPooling2D(2, padding="same", name=f"block{index}_pool")(conv(x))
    return embedding(layers().Flatten(name="flatten")(x), model)


def _tiny(x: Node, model: ModelConfig) -> Node:
    """Three strided convolutions, at most 60,000 parameters at 28x28x1; used by the quickstart."""
    for index, (filters, kernel) in enumerate(((16, 5), (32, 3), (22, 3)), start=1):
        x = layers().Conv2D(
            filters, kernel, strides=2, padding="same", activation="relu", name=f"block{index}_conv"
        )(x)
    return embedding(layers().Flatten(name="flatten")(x), model)


def _tanh_cnn(x: Node, model: ModelConfig) -> Node:
    """CNN with bounded activations, which keep gradients short (arXiv 2007.14191, table 1)."""
    small = model.image_size < 32
    stages = ((16, 8, 2), (32, 4, 2)) if small else ((32, 3, 1), (64, 3, 1), (128, 3, 1))
    for index, (filters, kernel, stride) in enumerate(stages, start=1):
        for part in range(1 if small else 2):
            x = layers().Conv2D(
                filters,
                kernel,
                strides=stride,
                padding="same",
                activation="tanh",
                name=f"block{index}_conv{part + 1}",
            )(x)
        x = layers().MaxPooling2D(2, 1 if small else 2, name=f"block{index}_pool")(x)
    return embedding(layers().Flatten(name="flatten")(x), model)


_STAGES = (
    (1, 1, 16, 1),
    (6, 2, 24, 2),
    (6, 2, 32, 3),
    (6, 2, 64, 4),
    (6, 1, 96, 3),
    (6, 2, 160, 3),
    (6, 1, 320, 1),
)
"""Expansion, stride of the first block, channels, blocks."""


def _norm(x: Node, model: ModelConfig, name: str) -> Node:
    return group_norm(x, model, name, 2, epsilon=1e-3)


def _inverted_residual(  # noqa: PLR0917 - the shape of a block, as every paper lists it
    x: Node, model: ModelConfig, expand: int, filters: int, stride: int, name: str
) -> Node:
    shortcut, width = x, x.shape[-1]
    if expand > 1:
        x = layers().Conv2D(expand * width, 1, use_bias=False, name=f"{name}_expand_conv")(x)
        x = layers().ReLU(6.0, name=f"{name}_expand_relu")(_norm(x, model, f"{name}_expand_norm"))
    if stride == 2:
        x = layers().ZeroPadding2D(1, name=f"{name}_pad")(x)
    x = layers().DepthwiseConv2D(
        3,
        strides=stride,
        padding="same" if stride == 1 else "valid",
        use_bias=False,
        name=f"{name}_depthwise_conv",
    )(x)
    x = layers().ReLU(6.0, name=f"{name}_depthwise_relu")(_norm(x, model, f"{name}_depthwise_norm"))
    x = layers().Conv2D(filters, 1, use_bias=False, name=f"{name}_project_conv")(x)
    x = _norm(x, model, f"{name}_project_norm")
    if stride == 1 and width == filters:
        x = layers().Add(name=f"{name}_add")([x, shortcut])
    return x


def _mobilenet(x: Node, model: ModelConfig) -> Node:
    """MobileNetV2 with GroupNorm, from the paper's code: 2,387,840 parameters."""
    x = layers().ZeroPadding2D(1, name="stem_pad")(x)
    x = layers().Conv2D(32, 3, strides=2, use_bias=False, name="stem_conv")(x)
    x = layers().ReLU(6.0, name="stem_relu")(_norm(x, model, "stem_norm"))
    for stage, (expand, stride, filters, count) in enumerate(_STAGES, start=1):
        for index in range(1, count + 1):
            name = f"block{stage}_{index}"
            x = _inverted_residual(x, model, expand, filters, stride if index == 1 else 1, name)
    x = layers().Conv2D(1280, 1, use_bias=False, name="last_conv")(x)
    x = layers().ReLU(6.0, name="last_relu")(_norm(x, model, "last_norm"))
    return embedding(layers().GlobalAveragePooling2D(name="pool")(x), model)


def _basic_block(  # noqa: PLR0917 - the shape of a block, as every paper lists it
    x: Node, model: ModelConfig, conv: LayerMaker, filters: int, stride: int, name: str
) -> Node:
    shortcut = x
    x = conv(filters, 3, strides=stride, padding="same", use_bias=False, name=f"{name}_conv1")(x)
    x = layers().ReLU(name=f"{name}_relu1")(group_norm(x, model, f"{name}_norm1", _GROUPS))
    x = conv(filters, 3, padding="same", use_bias=False, name=f"{name}_conv2")(x)
    x = group_norm(x, model, f"{name}_norm2", _GROUPS)
    if stride != 1 or shortcut.shape[-1] != filters:
        shortcut = conv(filters, 1, strides=stride, use_bias=False, name=f"{name}_shortcut_conv")(
            shortcut
        )
        shortcut = group_norm(shortcut, model, f"{name}_shortcut_norm", _GROUPS)
    return layers().ReLU(name=f"{name}_relu2")(layers().Add(name=f"{name}_add")([x, shortcut]))


def _resnet8(
    x: Node,
    model: ModelConfig,
    *,
    standardized: bool = False,
    widths: tuple[int, ...] = (16, 32, 64),
    stem: tuple[int, int] = (3, 1),
) -> Node:
    """ResNet-8 for small images: a stem (kernel, stride), then one basic block for each stage.

    GroupNorm has 8 groups. Widths of 32, 64 and 64 behind a 5x5 stem of stride 2 are as fast as
    LeNet at 28x28: 163,680 parameters with one channel and 128 dimensions.
    """
    conv = cast("LayerMaker", standardized_convolution()) if standardized else layers().Conv2D
    kernel, stride = stem
    x = conv(widths[0], kernel, strides=stride, padding="same", use_bias=False, name="stem_conv")(x)
    x = layers().ReLU(name="stem_relu")(group_norm(x, model, "stem_norm", _GROUPS))
    for stage, filters in enumerate(widths, start=1):
        x = _basic_block(x, model, conv, filters, 1 if stage == 1 else 2, f"block{stage}_1")
    return embedding(layers().GlobalAveragePooling2D(name="pool")(x), model)


def _wrn_16_4(x: Node, model: ModelConfig) -> Node:
    """WRN-16-4 as De et al. train it from scratch (arXiv 2204.13650, code v0.1).

    2.7 million parameters. Blocks of (ReLU, GroupNorm, convolution) twice.
    """
    conv = cast("LayerMaker", partial(standardized_convolution(), scaled=True))

    def active(y: Node, name: str) -> Node:
        y = layers().ReLU(name=f"{name}_relu")(y)
        return group_norm(y, model, f"{name}_norm", _WIDE_GROUPS)

    x = conv(16, 3, padding="same", name="stem_conv")(x)
    for stage, filters in enumerate((64, 128, 256), start=1):
        for index in (1, 2):
            name, stride = f"block{stage}_{index}", 2 if stage > 1 and index == 1 else 1
            y, shortcut = active(x, f"{name}_1"), x
            if index == 1:
                shortcut = conv(
                    filters, 1, strides=stride, padding="same", name=f"{name}_shortcut_conv"
                )(y)
            y = conv(filters, 3, strides=stride, padding="same", name=f"{name}_conv1")(y)
            y = conv(filters, 3, padding="same", name=f"{name}_conv2")(active(y, f"{name}_2"))
            x = layers().Add(name=f"{name}_add")([y, shortcut])
    x = active(x, "last")
    return embedding(layers().GlobalAveragePooling2D(name="pool")(x), model)


def _scattered(x: Node, model: ModelConfig) -> Node:
    """Scattering features `[batch, size / 4, size / 4, channels * 81]`; frozen.

    Raises:
      ConfigError: the image size is not a multiple of 4 (8 for mirrored features).
    """
    multiple = 8 if model.mirrored else 4
    if model.image_size % multiple:
        raise ConfigError(
            f"model.image_size={model.image_size} is not a multiple of {multiple}, as "
            f"{model.backbone} needs; take one that is"
        )
    return scattering_layer()(mirrored=model.mirrored, name="scattering")(x)


def _normalised(x: Node, model: ModelConfig) -> Node:
    """Normalises features; by default nine paths of a channel share mean and variance per image.

    The statistics depend only on the image itself. Second-order paths are small: a larger epsilon
    would flatten them.

    Raises:
      ConfigError: the groups do not divide the paths.
    """
    groups = PATHS * model.channels // 9
    options = {"epsilon": 1e-8, "center": False, "scale": False}
    return group_norm(x, model, "scattering_norm", groups, **options)


def _scatter_linear(x: Node, model: ModelConfig) -> Node:
    """The features themselves: 15,552 at 32x32x3 without a projection; no trainable layer."""
    x = _scattered(x, model)
    if model.whitened_directions:
        flat = whitened_layer()(directions=model.whitened_directions, name="whitened")(x)
    else:
        flat = layers().Flatten(name="flatten")(_normalised(x, model))
    return embedding(flat, model)


NETWORKS: dict[str, Build] = {
    "lenet": _lenet,
    "mobilenetv2": _mobilenet,
    "resnet8": _resnet8,
    "resnet8_s2": partial(_resnet8, widths=(32, 64, 64), stem=(5, 2)),
    "resnet8_ws": partial(_resnet8, standardized=True),
    "scatter_linear": _scatter_linear,
    "tanh_cnn": _tanh_cnn,
    "tiny": _tiny,
    "wrn_16_4": _wrn_16_4,
}
"""Name in `model.backbone` -> network."""
