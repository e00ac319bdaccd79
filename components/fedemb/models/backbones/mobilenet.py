"""MobileNetV2 with GroupNorm, from the paper's code."""

from __future__ import annotations

from fedemb.config import ModelConfig
from fedemb.models.arrays import Node
from fedemb.models.backbones.blocks import embedding, group_norm
from fedemb.models.backbones.registry import backbone
from fedemb.models.keras_backend import keras_layers as layers

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


def _mobilenet(x: Node, model: ModelConfig, stages: int, last: int) -> Node:
    x = layers().ZeroPadding2D(1, name="stem_pad")(x)
    x = layers().Conv2D(32, 3, strides=2, use_bias=False, name="stem_conv")(x)
    x = layers().ReLU(6.0, name="stem_relu")(_norm(x, model, "stem_norm"))
    for stage, (expand, stride, filters, count) in enumerate(_STAGES[:stages], start=1):
        for index in range(1, count + 1):
            name = f"block{stage}_{index}"
            x = _inverted_residual(x, model, expand, filters, stride if index == 1 else 1, name)
    x = layers().Conv2D(last, 1, use_bias=False, name="last_conv")(x)
    x = layers().ReLU(6.0, name="last_relu")(_norm(x, model, "last_norm"))
    return embedding(layers().GlobalAveragePooling2D(name="pool")(x), model)


@backbone("mobilenetv2")
def mobilenetv2(x: Node, model: ModelConfig) -> Node:
    """MobileNetV2 with GroupNorm(2): 2,387,840 parameters."""
    return _mobilenet(x, model, 7, 1280)


@backbone("mobilenet_small")
def mobilenet_small(x: Node, model: ModelConfig) -> Node:
    """The first three stages of MobileNetV2: 159,296 parameters."""
    return _mobilenet(x, model, 3, 640)
