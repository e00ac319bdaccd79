"""Wide residual networks as De et al. train them from scratch (arXiv 2204.13650, code v0.1)."""

from __future__ import annotations

from fedemb.config import ModelConfig
from fedemb.models.arrays import Node
from fedemb.models.backbones.blocks import convolution, embedding, group_norm, joined
from fedemb.models.backbones.registry import backbone
from fedemb.models.keras_backend import keras_layers as layers

_GROUPS = 16


def _wide_resnet(x: Node, model: ModelConfig, depth: int) -> Node:
    """Blocks of (ReLU, GroupNorm, convolution) twice; 64, 128 and 256 channels."""
    conv = convolution(model, "gain")

    def active(y: Node, name: str) -> Node:
        y = layers().ReLU(name=f"{name}_relu")(y)
        return group_norm(y, model, f"{name}_norm", _GROUPS)

    x = conv(16, 3, padding="same", name="stem_conv")(x)
    for stage, filters in enumerate((64, 128, 256), start=1):
        for index in range(1, (depth - 4) // 6 + 1):
            name, stride = f"block{stage}_{index}", 2 if stage > 1 and index == 1 else 1
            y, shortcut = active(x, f"{name}_1"), x
            if index == 1:
                shortcut = conv(
                    filters, 1, strides=stride, padding="same", name=f"{name}_shortcut_conv"
                )(y)
            y = conv(filters, 3, strides=stride, padding="same", name=f"{name}_conv1")(y)
            y = conv(filters, 3, padding="same", name=f"{name}_conv2")(active(y, f"{name}_2"))
            x = joined(y, shortcut, model, name, _GROUPS)
    x = active(x, "last")
    return embedding(layers().GlobalAveragePooling2D(name="pool")(x), model)


@backbone("wrn_16_4")
def wrn_16_4(x: Node, model: ModelConfig) -> Node:
    """WRN-16-4: 2.7 million parameters."""
    return _wide_resnet(x, model, 16)


@backbone("wrn_40_4")
def wrn_40_4(x: Node, model: ModelConfig) -> Node:
    """WRN-40-4: 8.9 million parameters."""
    return _wide_resnet(x, model, 40)
