"""Augmented views of an image: crops with a mirrored border, and mirror images.

Moves are drawn on the host from the unit's seed and applied as whole pixels, so a view has the same
bits on any device.
"""

from __future__ import annotations

from typing import cast

import numpy as np

from fedemb.config import UnitGradientConfig
from fedemb.models.arrays import Tensor
from fedemb.models.keras_backend import keras_ops


def draw_moves(config: UnitGradientConfig, seed: np.random.SeedSequence) -> np.ndarray:
    """Draws the views of all images of a unit.

    Args:
      config: images, views, crop and flip.
      seed: seed of the unit in the round; used for nothing else.

    Returns:
      int32 `[images_per_unit, views, 3]`: pixels down, pixels right, whether mirrored.
    """
    shape = (config.images_per_unit, config.views)
    words = seed.generate_state(int(np.prod(shape))).reshape(shape)
    reach = 2 * config.crop_padding + 1
    down = (words & 0xFFFF) % reach
    right = ((words >> 16) & 0x7FFF) % reach
    mirrored = (words >> 31) if config.flip else np.zeros_like(words)
    moves = np.stack([down, right, mirrored], axis=-1).astype(np.int32)
    return moves - np.array([config.crop_padding, config.crop_padding, 0], np.int32)


def apply_moves(images: Tensor, moves: Tensor) -> Tensor:
    """Moves each image by whole pixels, with a mirrored border.

    Args:
      images: uint8 `[images, size, size, channels]`.
      moves: int32 `[images, views, 3]`.

    Returns:
      uint8 `[images * views, size, size, channels]`.
    """
    ops = keras_ops()
    _, size, _, channels = cast("tuple[int, ...]", images.shape)
    per_image = moves.shape[1]
    moves = ops.reshape(moves, (-1, 3))
    places = ops.arange(size, dtype="int32")[None, :]

    def inside(shift: Tensor) -> Tensor:
        at = ops.abs(places + shift[:, None])
        return (size - 1) - ops.abs((size - 1) - at)

    down, right = inside(moves[:, 0]), inside(moves[:, 1])
    right = ops.where(moves[:, 2:3] > 0, ops.flip(right, axis=1), right)
    # Gathers whole pixels; no value is computed.
    image = ops.arange(ops.shape(moves)[0], dtype="int32") // per_image
    rows = (image[:, None] * size + down)[:, :, None] * size + right[:, None, :]
    return ops.take(ops.reshape(images, (-1, channels)), rows, axis=0)
