"""Pixel values that a network was trained on: read from its file, and made from those of a run."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from fedemb.errors import ConfigError
from fedemb.foundation.canonical_json import Json, JsonObject
from fedemb.models.keras_backend import Node, keras_layers
from fedemb.models.networks import NETWORKS

_SCALE = 128.0
"""A network gets `x / 128 - 1` for pixel values `x` in 0..255, see `preprocess`."""


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
        mean, deviation = (
            f"{values[0]:g}" if len({*values}) == 1 else f"[{', '.join(f'{v:g}' for v in values)}]"
            for values in (self.mean, self.deviation)
        )
        return f"(x - {mean}) / {deviation}{order}"


BY_KIND = {
    "-1..1": Pixels((127.5,) * 3, (127.5,) * 3),
    "0..1": Pixels((0.0,) * 3, (255.0,) * 3),
    "0..255": Pixels((0.0,) * 3, (1.0,) * 3),
    "imagenet": Pixels((123.675, 116.28, 103.53), (58.395, 57.12, 57.375)),
    "caffe": Pixels((103.939, 116.779, 123.68), (1.0,) * 3, reversed=True),
}
"""Pixel values by the name in `pretraining.import_pixels`."""
_BY_NAME = {
    r"mobilenet(v2)?_\d.*|resnet\d+v2|xception|inception_v3|inception_resnet_v2|nasnet_.*": "-1..1",
    r"densenet\d+": "imagenet",
    r"resnet\d+|vgg(16|19)": "caffe",
}
"""Output format of `preprocess_input` in Keras applications, by network name."""


def declared_pixels(net: Mapping[str, Json]) -> tuple[str, str] | None:
    """Returns the training pixel format of a network and the evidence for it; None if unknown.

    A first layer that rescales pixels expects 0..255, or its format is unknown.

    Args:
      net: the configuration of a Keras model.
    """
    found = net.get("layers")
    layers = [layer for layer in (found if isinstance(found, list) else []) if type(layer) is dict]
    inputs = [layer for layer in layers if layer.get("class_name") == "InputLayer"]
    inner = [layer for layer in layers if layer not in inputs]
    settings = _settings(inner[0]) if inner else {}
    if inner and inner[0].get("class_name") in ("Rescaling", "Normalization"):
        return ("0..255", f"its layer {settings.get('name')}") if _takes_bytes(settings) else None
    if len(inner) == 1 and "layers" in settings:
        return declared_pixels(settings)
    name = str(net.get("name"))
    if [_settings(layer).get("name") for layer in inputs] == ["images"] and name in NETWORKS:
        return "-1..1", f"{name} of this package"
    for pattern, pixels in _BY_NAME.items():
        if re.fullmatch(pattern, name):
            return pixels, f"{name} of Keras' applications"
    return None


def _settings(layer: JsonObject) -> JsonObject:
    found = layer.get("config")
    return found if isinstance(found, dict) else {}


def _takes_bytes(settings: JsonObject) -> bool:
    match settings:
        case {"scale": float(scale), "offset": float() | int() as offset}:
            return math.isclose(255 * scale + offset, 1, rel_tol=0.02)
        case {"mean": [*means]} if means:
            return max((mean for mean in means if isinstance(mean, int | float)), default=0) > 2
        case _:
            return False


def rescaled(images: Node, kind: str) -> Node:
    """Converts images `x / 128 - 1` to a format of `pretraining.import_pixels`; `-1..1` is kept.

    Raises:
      ConfigError: the format is of colour photos, and the images are grey.
    """
    if kind in ("imagenet", "caffe") and images.shape[-1] == 1:
        raise ConfigError(
            f"pretraining.import_pixels={kind} is of colour photos, got model.channels=1; set "
            "model.channels: 3"
        )
    return images if kind == "-1..1" else converted(images, BY_KIND[kind])


def converted(images: Node, pixels: Pixels) -> Node:
    """Converts images `x / 128 - 1` to pixel values by a fixed convolution of one pixel."""
    channels = images.shape[-1]
    mean, deviation = (np.array(one[:channels]) for one in (pixels.mean, pixels.deviation))
    order = slice(None, None, -1 if pixels.reversed else 1)
    fixed = keras_layers().Conv2D(channels, 1, trainable=False, name="pixels")
    output = fixed(images)
    kernel = np.eye(channels)[order] * (_SCALE / deviation)
    weights = (kernel[None, None], (_SCALE - mean) / deviation)
    fixed.set_weights([one.astype(np.float32) for one in weights])
    return output
