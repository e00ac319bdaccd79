"""What backbones are put together from: convolutions, normalisation, the last layer."""

from __future__ import annotations

from typing import Any

from fedemb.config import ModelConfig
from fedemb.errors import ConfigError
from fedemb.models.standardized import gain_convolution, standardized_convolution


def layers() -> Any:
    """`keras.layers`; Keras is imported when a backbone is built, not before."""
    import keras

    return keras.layers


def convolution(model: ModelConfig, default: str = "none") -> Any:
    """The convolution layer: plain, with standardised weights, or with a gain besides.

    Args:
      model: `weight_standardization` decides.
      default: what the backbone has where the configuration leaves it open.
    """
    kind = model.weight_standardization or default
    if kind == "gain":
        return gain_convolution()
    return standardized_convolution() if kind == "plain" else layers().Conv2D


def group_norm(
    x: Any, model: ModelConfig, name: str, groups: int, *, epsilon: float = 1e-5, **options: Any
) -> Any:
    """Normalises each image by groups of its own channels; nothing where the groups are 0.

    Args:
      x: `[batch, height, width, channels]`.
      model: `norm_groups` decides.
      name: of the layer.
      groups: what the backbone has where the configuration leaves it open.
      epsilon: under the root.
      options: of the layer.

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


def joined(branch: Any, shortcut: Any, model: ModelConfig, name: str, groups: int) -> Any:
    """Branch plus shortcut, normalised once more with `scale_norm` (arXiv 2203.00324)."""
    x = layers().Add(name=f"{name}_add")([branch, shortcut])
    return group_norm(x, model, f"{name}_scale_norm", groups) if model.scale_norm else x


def embedding(x: Any, model: ModelConfig, **options: Any) -> Any:
    """The projection: a dense layer or two, or none where the features are the embedding.

    Args:
      x: `[batch, features]`.
      model: `projection`, `projection_units` and `embedding_dim` decide.
      options: of the last layer.
    """
    if not model.projection:
        return x
    if model.projection_units:
        x = layers().Dense(model.projection_units, activation="relu", name="embedding_hidden")(x)
    return layers().Dense(model.embedding_dim, name="embedding", **options)(x)
