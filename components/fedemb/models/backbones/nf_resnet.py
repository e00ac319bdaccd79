"""Residual networks without normalisation: scaled activations, standardised weights.

Brock et al. (arXiv 2101.08692): every activation has variance 1 at initialization, so each block
divides its input by the standard deviation that the sum of branches has reached.
"""

from __future__ import annotations

import math

from fedemb.config import ModelConfig
from fedemb.models.arrays import Node
from fedemb.models.backbones.blocks import convolution, embedding
from fedemb.models.backbones.registry import backbone
from fedemb.models.keras_backend import keras_layers as layers

_RELU_GAIN = math.sqrt(2.0 / (1.0 - 1.0 / math.pi))
_BRANCH = 0.2
"""Factor of each residual branch (alpha)."""


@backbone("nf_resnet50")
def nf_resnet50(x: Node, model: ModelConfig) -> Node:
    """NF-ResNet-50 with a strided 7x7 stem and a pool.

    The skip gain of a branch is the gain of its last convolution.
    """
    import keras

    conv = convolution(model, "gain")

    def active(y: Node, name: str, factor: float = 1.0) -> Node:
        y = layers().ReLU(name=f"{name}_relu")(y)
        return layers().Rescaling(_RELU_GAIN * factor, name=f"{name}_scale")(y)

    x = conv(64, 7, strides=2, padding="same", name="stem_conv")(x)
    x = layers().MaxPooling2D(3, strides=2, padding="same", name="stem_pool")(x)
    variance = 1.0
    for stage, (filters, count) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3)), start=2):
        for index in range(1, count + 1):
            name, stride = f"stage{stage}_{index}", 2 if stage > 2 and index == 1 else 1
            y, shortcut = active(x, f"{name}_1", variance**-0.5), x
            if index == 1:
                shortcut = y
                if stride == 2:
                    shortcut = layers().AveragePooling2D(2, padding="same", name=f"{name}_pool")(y)
                shortcut = conv(4 * filters, 1, name=f"{name}_shortcut_conv")(shortcut)
                variance = 1.0
            y = conv(filters, 1, name=f"{name}_conv1")(y)
            y = conv(filters, 3, strides=stride, padding="same", name=f"{name}_conv2")(
                active(y, f"{name}_2")
            )
            y = conv(4 * filters, 1, name=f"{name}_conv3")(active(y, f"{name}_3"))
            y = layers().Rescaling(_BRANCH, name=f"{name}_branch")(y)
            x = layers().Add(name=f"{name}_add")([y, shortcut])
            variance += _BRANCH**2
    x = layers().GlobalAveragePooling2D(name="pool")(active(x, "last"))
    return embedding(x, model, kernel_initializer=keras.initializers.RandomNormal(stddev=0.01))
