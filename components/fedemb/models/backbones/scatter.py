"""Networks on the scattering transform: a frozen part without training data, few trained layers.

Tramer and Boneh (arXiv 2011.11660): for small privacy budgets, these networks outperform networks
that learn all layers.
"""

from __future__ import annotations

from fedemb.config import ModelConfig
from fedemb.errors import ConfigError
from fedemb.models.arrays import Node
from fedemb.models.backbones.blocks import embedding, group_norm
from fedemb.models.backbones.registry import backbone
from fedemb.models.keras_backend import keras_layers as layers
from fedemb.models.scattering import PATHS, scattering_layer
from fedemb.models.whitened import whitened_layer


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


@backbone("scatter_linear", mirrors=True)
def scatter_linear(x: Node, model: ModelConfig) -> Node:
    """The features themselves: 15,552 at 32x32x3 without a projection; no trainable layer."""
    x = _scattered(x, model)
    if model.whitened_directions:
        flat = whitened_layer()(directions=model.whitened_directions, name="whitened")(x)
    else:
        flat = layers().Flatten(name="flatten")(_normalised(x, model))
    return embedding(flat, model)


@backbone("scatter_cnn", mirrors=True)
def scatter_cnn(x: Node, model: ModelConfig) -> Node:
    """Two 3x3 convolutions of 64 channels with tanh on the features."""
    x = _normalised(_scattered(x, model), model)
    for index in (1, 2):
        x = layers().Conv2D(64, 3, padding="same", activation="tanh", name=f"block{index}_conv")(x)
        if index == 1:
            x = layers().MaxPooling2D(2, name="block1_pool")(x)
    return embedding(layers().Flatten(name="flatten")(x), model)
