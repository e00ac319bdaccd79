"""Baseline that uses the image itself as its embedding; a backbone must outperform it."""

from __future__ import annotations

from fedemb.config import ModelConfig
from fedemb.models.arrays import Model

MOST_VALUES = 1024
"""Maximum number of values of one image; larger images are first averaged over squares."""


def raw_pixels(model: ModelConfig) -> Model:
    """Returns a model without weights: float32 `[n, size, size, channels]` to `[n, values]`."""
    import keras

    size, channels = model.image_size, model.channels
    square = 1
    while (-(-size // square)) ** 2 * channels > MOST_VALUES:
        square += 1
    pixels = keras.Input((size, size, channels))
    small = keras.layers.AveragePooling2D(square, padding="same")(pixels)
    return keras.Model(pixels, keras.layers.Flatten()(small), name="raw_pixels")
