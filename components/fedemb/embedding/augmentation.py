"""Random affine copies of images, every number from a stateless seed."""

from __future__ import annotations

import math
from typing import Any

from fedemb.config import AugmentationConfig


def affine_transforms(config: AugmentationConfig, count: Any, size: int, seed: Any) -> Any:
    """Draws projective transforms about the image centre, output pixel to input pixel.

    Args:
      config: ranges of rotation, scale, shear, translation; whether to mirror.
      count: int scalar, how many.
      size: height and width of the images in pixels.
      seed: int tensor `[2]`.

    Returns:
      float32 `[count, 8]`, as `ImageProjectiveTransformV3` takes them.
    """
    import tensorflow as tf

    draws = tf.random.stateless_uniform([7, count], seed, minval=-1.0, maxval=1.0)
    angle = draws[0] * (config.rotation_degrees * math.pi / 180.0)
    zoom_x = 1.0 + draws[1] * config.scale
    zoom_y = 1.0 + draws[2] * config.scale
    shear = draws[3] * config.shear
    shift_x, shift_y = draws[4] * config.translation * size, draws[5] * config.translation * size
    if config.flip:
        zoom_x *= tf.sign(draws[6])
    cos, sin, center = tf.cos(angle), tf.sin(angle), (size - 1) / 2.0
    a0, a1 = zoom_x * cos, zoom_y * (shear * cos - sin)
    b0, b1 = zoom_x * sin, zoom_y * (shear * sin + cos)
    a2 = center - a0 * center - a1 * center + shift_x
    b2 = center - b0 * center - b1 * center + shift_y
    zero = tf.zeros_like(a0)
    return tf.stack([a0, a1, a2, b0, b1, b2, zero, zero], axis=1)


def augment(images: Any, labels: Any, config: AugmentationConfig, seed: Any) -> tuple[Any, Any]:
    """Returns `multiplicity` affine copies of every image, and the labels to go with them.

    Augmentation happens inside the virtual client, before its update is clipped, and so costs
    nothing in privacy (arXiv 2204.13650, section 3.2).

    Args:
      images: `[examples, size, size, channels]`, uint8 or float32; edges are repeated outwards.
      labels: `[examples]`.
      config: ranges and multiplicity.
      seed: int tensor `[2]`.
    """
    import tensorflow as tf

    size = images.shape[1]
    if config.multiplicity > 1:
        images = tf.repeat(images, config.multiplicity, axis=0)
        labels = tf.repeat(labels, config.multiplicity, axis=0)
    moved = tf.raw_ops.ImageProjectiveTransformV3(
        images=images,
        transforms=affine_transforms(config, tf.shape(images)[0], size, seed),
        output_shape=tf.constant([size, size]),
        fill_value=0.0,
        interpolation="BILINEAR",
        fill_mode="NEAREST",
    )
    return tf.ensure_shape(moved, images.shape), labels
