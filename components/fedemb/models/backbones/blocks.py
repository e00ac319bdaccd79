"""Building blocks of backbones: normalisation and the last layer."""

from __future__ import annotations

from fedemb.config import ModelConfig
from fedemb.errors import ConfigError
from fedemb.models.arrays import Node
from fedemb.models.keras_backend import keras_layers as layers


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

    Args:
      x: `[batch, features]`.
      model: model configuration with `projection` and `embedding_dim`.
    """
    if not model.projection:
        return x
    bias = model.projection_bias
    return layers().Dense(model.embedding_dim, name="embedding", use_bias=bias)(x)
