"""Networks with few layers, without normalisation."""

from __future__ import annotations

from fedemb.config import ModelConfig
from fedemb.models.arrays import Node
from fedemb.models.backbones.blocks import embedding
from fedemb.models.backbones.registry import backbone
from fedemb.models.keras_backend import keras_layers as layers


@backbone("lenet")
def lenet(x: Node, model: ModelConfig) -> Node:
    """Two 5x5 convolutions and one dense layer: 453,632 parameters at 28x28x1, 128."""
    for index, filters in enumerate((32, 64), start=1):
        conv = layers().Conv2D(
            filters, 5, padding="same", activation="relu", name=f"block{index}_conv"
        )
        x = layers().MaxPooling2D(2, padding="same", name=f"block{index}_pool")(conv(x))
    return embedding(layers().Flatten(name="flatten")(x), model)


@backbone("tiny")
def tiny(x: Node, model: ModelConfig) -> Node:
    """Three strided convolutions, at most 60,000 parameters at 28x28x1; used by the quickstart."""
    for index, (filters, kernel) in enumerate(((16, 5), (32, 3), (22, 3)), start=1):
        x = layers().Conv2D(
            filters, kernel, strides=2, padding="same", activation="relu", name=f"block{index}_conv"
        )(x)
    return embedding(layers().Flatten(name="flatten")(x), model)


@backbone("tanh_cnn")
def tanh_cnn(x: Node, model: ModelConfig) -> Node:
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
