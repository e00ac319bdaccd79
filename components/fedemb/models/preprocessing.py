"""Scales pixels to a backbone's input range; `data/photos.py` decodes the pixels."""

from __future__ import annotations

from jaxtyping import Float32, Num

from fedemb.models.arrays import Model, Tensor
from fedemb.models.keras_backend import keras_ops


def preprocess(
    images: Num[Tensor, "*batch height width channels"],
) -> Float32[Tensor, "*batch height width channels"]:
    """Scales pixels to the range the backbones are trained on: `x / 128 - 1`.

    Args:
      images: uint8 (or any number) `[..., height, width, channels]` in 0..255.

    Returns:
      float32 of the same shape in [-1, 0.992].
    """
    ops = keras_ops()
    return ops.cast(images, "float32") * (1.0 / 128.0) - 1.0


def input_of(model: Model, examples: Tensor) -> Tensor:
    """Returns a model's input: scaled pixels, or the features of its trunk if it has been cut."""
    return preprocess(examples) if len(model.input_shape) == 4 else examples
