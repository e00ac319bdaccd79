"""Random affine copies of images; the caller provides the random numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import cast

from jaxtyping import Float32, Int, Num

from fedemb.config import AugmentationConfig
from fedemb.models.arrays import AnyTensor, Tensor, TfTensor
from fedemb.models.keras_backend import keras_ops

_ROTATION, _SCALE, _SHEAR, _SHIFT = math.pi / 18.0, 0.1, 0.15, 0.07
"""Largest rotation in radians, change of scale, shear, and shift as a share of the image size."""
DRAWS = 7
"""Random numbers in [-1, 1) per copy."""


def affine_transforms(
    config: AugmentationConfig, size: int, draws: Float32[Tensor, "draws count"]
) -> Float32[Tensor, "count 8"]:
    """Returns projective transforms about the image center, output pixel to input pixel.

    Args:
      config: whether to mirror.
      size: height and width of the images in pixels.
      draws: `[DRAWS, count]`, uniform in [-1, 1).

    Returns:
      float32 `[count, 8]`, as `ImageProjectiveTransformV3` takes them.
    """
    ops = keras_ops()
    angle = draws[0] * _ROTATION
    zoom_x = 1.0 + draws[1] * _SCALE
    zoom_y = 1.0 + draws[2] * _SCALE
    shear = draws[3] * _SHEAR
    shift_x, shift_y = draws[4] * _SHIFT * size, draws[5] * _SHIFT * size
    if config.flip:
        zoom_x *= ops.sign(draws[6])
    cos, sin, center = ops.cos(angle), ops.sin(angle), (size - 1) / 2.0
    a0, a1 = zoom_x * cos, zoom_y * (shear * cos - sin)
    b0, b1 = zoom_x * sin, zoom_y * (shear * sin + cos)
    a2 = center - a0 * center - a1 * center + shift_x
    b2 = center - b0 * center - b1 * center + shift_y
    zero = ops.zeros_like(a0)
    return ops.stack([a0, a1, a2, b0, b1, b2, zero, zero], axis=1)


def augment(
    images: Num[AnyTensor, "examples size size channels"],
    config: AugmentationConfig,
    uniform: Callable[[Sequence[int]], AnyTensor],
) -> Float32[AnyTensor, "examples size size channels"]:
    """Returns a random affine copy of every image.

    Augmentation is done inside the virtual client, before its update is clipped, so it costs no
    privacy (arXiv 2204.13650, section 3.2).

    Args:
      images: `[examples, size, size, channels]`, uint8 or float32; edges are repeated outwards.
      config: whether to mirror.
      uniform: shape to numbers in [-1, 1), float32.
    """
    ops = keras_ops()
    size = cast("int", images.shape[1])
    draws = uniform([DRAWS, ops.shape(images)[0]])
    # float32, because backends round interpolated integers differently.
    return ops.image.affine_transform(
        ops.cast(images, "float32"), affine_transforms(config, size, draws), fill_mode="nearest"
    )


def stateless_draws(seed: Int[TfTensor, "2"]) -> Callable[[Sequence[int]], TfTensor]:
    """Returns the draws of `augment` from a seed `[2]`, in a TensorFlow graph."""
    import tensorflow as tf

    return lambda shape: tf.random.stateless_uniform(shape, seed, minval=-1.0, maxval=1.0)
