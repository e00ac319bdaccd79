"""Building blocks of backbones: convolutions, normalisation, the last layer."""

from __future__ import annotations

from fedemb.config import ModelConfig
from fedemb.errors import ConfigError
from fedemb.models.arrays import LayerMaker, Node
from fedemb.models.keras_backend import keras_layers as layers
from fedemb.models.standardized import gain_convolution, standardized_convolution


def convolution(model: ModelConfig, default: str = "none") -> LayerMaker:
    """Returns the convolution layer: plain, with standardised weights, or also with a gain.

    Args:
      model: model configuration; `weight_standardization` selects the layer.
      default: the backbone's choice if the configuration sets none.
    """
    kind = model.weight_standardization or default
    if kind == "gain":
        return gain_convolution()
    return standardized_convolution() if kind == "plain" else layers().Conv2D


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


def joined(branch: Node, shortcut: Node, model: ModelConfig, name: str, groups: int) -> Node:
    """Returns branch plus shortcut, normalised again with `scale_norm` (arXiv 2203.00324)."""
    x = layers().Add(name=f"{name}_add")([branch, shortcut])
    return group_norm(x, model, f"{name}_scale_norm", groups) if model.scale_norm else x


def embedding(x: Node, model: ModelConfig, **options: object) -> Node:
    """Returns the projection: one or two dense layers, or none if the features are the embedding.

    Args:
      x: `[batch, features]`.
      model: model configuration with `projection`, `projection_units` and `embedding_dim`.
      options: options of the last layer.
    """
    if not model.projection:
        return x
    if model.projection_units:
        x = layers().Dense(model.projection_units, activation="relu", name="embedding_hidden")(x)
    dense = layers().Dense(
        model.embedding_dim, name="embedding", use_bias=model.projection_bias, **options
    )
    return dense(x)
