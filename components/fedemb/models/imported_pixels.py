"""The pixel format an imported backbone was trained on: read from the file, and converted to."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from fedemb.errors import ConfigError
from fedemb.foundation.canonical_json import Json, JsonObject
from fedemb.models.backbones.networks import NETWORKS
from fedemb.models.keras_backend import keras_layers, keras_ops

if TYPE_CHECKING:
    import keras

_IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
"""Mean and standard deviation of ImageNet's red, green and blue in [0, 1]."""
_CAFFE = (103.939, 116.779, 123.68)
"""Mean of ImageNet's blue, green and red in [0, 255]."""


_BY_NAME = {
    r"mobilenet(v2)?_\d.*|resnet\d+v2|xception|inception_v3|inception_resnet_v2|nasnet_.*": "-1..1",
    r"densenet\d+": "imagenet",
    r"resnet\d+|vgg(16|19)": "caffe",
}
"""Output format of `preprocess_input` in Keras applications, by network name."""


def told_pixels(net: Mapping[str, Json]) -> tuple[str, str] | None:
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
        return told_pixels(settings)
    return _by_name(str(net.get("name")), [_settings(layer).get("name") for layer in inputs])


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


def _by_name(name: str, inputs: list[Json]) -> tuple[str, str] | None:
    if inputs == ["images"] and name in NETWORKS:
        return "-1..1", f"{name} of this package"
    for pattern, pixels in _BY_NAME.items():
        if re.fullmatch(pattern, name):
            return pixels, f"{name} of Keras' applications"
    return None


def rescaled(images: keras.KerasTensor, pixels: str) -> keras.KerasTensor:
    """Converts images in [-1, 1] to the file's pixel format by a fixed convolution of one pixel."""
    import numpy as np

    if pixels == "-1..1":
        return images
    channels: int = keras_ops().shape(images)[-1]
    scale, offset, order = np.ones(channels), np.zeros(channels), np.arange(channels)
    if pixels in ("imagenet", "caffe") and channels == 1:
        raise ConfigError(
            f"pretraining.import_pixels={pixels} is of colour photos, got model.channels=1; set "
            "model.channels: 3"
        )
    if pixels == "0..1":
        scale, offset = scale / 2, offset + 1 / 2
    elif pixels == "0..255":
        scale, offset = scale * 255 / 2, offset + 255 / 2
    elif pixels == "imagenet":
        mean, deviation = (np.array(item) for item in _IMAGENET)
        scale, offset = 1 / 2 / deviation, (1 / 2 - mean) / deviation
    else:
        scale, offset, order = scale * 255 / 2, 255 / 2 - np.array(_CAFFE), order[::-1]
    fixed = keras_layers().Conv2D(channels, 1, kernel_initializer="zeros", name="pixels")
    output = fixed(images)
    kernel = np.eye(channels)[:, order] * scale
    fixed.set_weights([kernel[None, None].astype(np.float32), offset.astype(np.float32)])
    fixed.trainable = False
    return output
