"""Pixel values that weights were trained on, and the first layer that makes them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedemb.models.arrays import Node
from fedemb.models.keras_backend import input_node, keras_layers

SCALE = 128.0
"""The pipeline gives a network `x / 128 - 1` for pixel values `x` in 0..255."""


@dataclass(frozen=True)
class Pixels:
    """Pixel values `(x - mean) / deviation`, for `x` in 0..255, in the order of the channels."""

    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    reversed: bool = False
    """Whether the network takes blue, green and red; `mean` is in that order, too."""

    def __str__(self) -> str:
        """Returns the formula."""
        order = " in the order BGR" if self.reversed else ""
        if len({*self.mean}) == len({*self.deviation}) == 1:
            return f"(x - {self.mean[0]:g}) / {self.deviation[0]:g}{order}"
        mean, deviation = (
            f"[{', '.join(f'{one:.6g}' for one in values)}]"
            for values in (self.mean, self.deviation)
        )
        return f"(x - {mean}) / {deviation}{order}"


IMAGENET = Pixels(
    tuple(255 * one for one in (0.485, 0.456, 0.406)),
    tuple(255 * one for one in (0.229, 0.224, 0.225)),
)
"""ImageNet's mean and standard deviation of red, green and blue."""
HALF = Pixels((127.5,) * 3, (127.5,) * 3)
"""Pixels in -1..1."""
OURS = Pixels((SCALE,) * 3, (SCALE,) * 3)
"""Pixels that the pipeline gives."""
BY_KIND = {
    "-1..1": HALF,
    "0..1": Pixels((0.0,) * 3, (255.0,) * 3),
    "0..255": Pixels((0.0,) * 3, (1.0,) * 3),
    "imagenet": IMAGENET,
    "caffe": Pixels((103.939, 116.779, 123.68), (1.0,) * 3, reversed=True),
}
"""Pixel values by the name in `pretraining.import_pixels`."""


def image_input(size: int, pixels: Pixels) -> tuple[Node, Node]:
    """Returns the input of a network and the trained pixel values.

    Args:
      size: height and width.
      pixels: pixel values that the weights were trained on.

    Returns:
      The input tensor, `x / 128 - 1`, and the tensor `(x - mean) / deviation`.
    """
    layers = keras_layers()
    inputs = input_node((size, size, len(pixels.mean)), "images")
    if pixels == OURS:
        return inputs, inputs
    scale = [SCALE / deviation for deviation in pixels.deviation]
    pairs = zip(pixels.mean, pixels.deviation, strict=True)
    offset = [(SCALE - mean) / deviation for mean, deviation in pairs]
    if not pixels.reversed:
        return inputs, layers.Rescaling(scale, offset=offset, name="pixel_values")(inputs)
    swap = layers.Conv2D(len(scale), 1, name="pixel_values", trainable=False)
    outputs = swap(inputs)
    kernel = np.eye(len(scale), dtype=np.float32)[::-1] * np.array(scale, np.float32)
    swap.set_weights([kernel[None, None], np.array(offset, np.float32)])
    return inputs, outputs
