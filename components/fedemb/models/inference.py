"""Inference with finished models, and the baseline of raw pixels."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import cast
from weakref import WeakKeyDictionary

import numpy as np
from jaxtyping import Float32, Num, UInt8

from fedemb.config import ModelConfig
from fedemb.errors import ConfigError
from fedemb.foundation.canonical_json import sha256_hex
from fedemb.models.keras_backend import Model, Tensor, keras_ops, traced
from fedemb.models.losses import unit_rows

_TRACED: WeakKeyDictionary[Model, Callable[[np.ndarray], Tensor]] = WeakKeyDictionary()
_VALUES = 1 << 20
"""Maximum number of input values of a batch, because activations are many times as large."""


def outputs(
    model: Model,
    examples: Num[np.ndarray, "images ..."],
    batch_size: int = 256,
    last: Callable[[Tensor], Tensor] | None = None,
) -> Float32[np.ndarray, "images ..."]:
    """Returns a model's outputs for images, or its last layers' outputs for features.

    Args:
      model: `keras.Model`, built, loaded or cut.
      examples: uint8 `[images, size, size, channels]`, or float32 `[images, features]`.
      batch_size: images in memory at once as floats, fewer if they are large; the last batch is
          padded, so that an output does not depend on the number of images after it.
      last: function applied to the outputs of a batch, including padding, for the same reason.
    """
    from fedemb.models.keras_backend import input_of

    def forward(batch: np.ndarray) -> Tensor:
        return keras_ops().cast(model(input_of(model, batch), training=False), "float32")

    if model not in _TRACED:
        _TRACED[model] = traced(forward)
    count = len(examples)
    batch_size = max(1, min(batch_size, _VALUES // math.prod(examples.shape[1:])))
    result = np.empty((count, *model.output_shape[1:]), np.float32)
    for start in range(0, count, batch_size):
        batch = examples[start : start + batch_size]
        used = len(batch)
        if used < batch_size:
            padding = np.zeros((batch_size - used, *batch.shape[1:]), batch.dtype)
            batch = np.concatenate([batch, padding])
        found = _TRACED[model](batch)
        result[start : start + used] = np.asarray(last(found) if last else found)[:used]
    return result


def embed(
    backbone: Model,
    images: UInt8[np.ndarray, "images size size channels"] | Float32[np.ndarray, "images features"],
    batch_size: int = 256,
) -> Float32[np.ndarray, "images dim"]:
    """Embeds images, or features, and scales every embedding to unit length; see `outputs`."""
    return outputs(backbone, images, batch_size, cast("Callable[[Tensor], Tensor]", unit_rows))


def classify(
    classifier: Model,
    images: UInt8[np.ndarray, "images size size channels"] | Float32[np.ndarray, "images features"],
    batch_size: int = 256,
) -> Float32[np.ndarray, "images classes"]:
    """Returns probabilities of the classes, rows that sum to 1; see `outputs`.

    Args:
      classifier: `keras.Model` with logits as outputs.
      images: images or features.
      batch_size: images in memory at once.
    """
    return outputs(classifier, images, batch_size, keras_ops().softmax)


class SharedFeatures:
    """Evaluates several models on images; the features of a shared frozen part are computed once.

    Args:
      models: `keras.Model`s by name.
      group: `model.trainable`, which selects the layers after the frozen part.
      apply: `embed` or `classify`.
    """

    def __init__(
        self, models: Mapping[str, Model], group: str, apply: Callable[..., np.ndarray]
    ) -> None:
        self._apply = apply
        self.trunks: dict[str, Model] = {}
        """Trunks by digest: models with the same trunk share its features."""
        self._parts = {name: self._cut(model, group) for name, model in models.items()}

    def _cut(self, model: Model, group: str) -> tuple[str | None, Model]:
        import keras

        from fedemb.models.backbones import cut

        if group not in ("head", "projection"):
            return None, model
        try:
            trunk, rest = cut(model, group)
        except ConfigError:  # no frozen part: input is pixels or features
            features = keras.Input(model.output_shape[1:])
            trunk, rest = model, keras.Model(features, keras.layers.Identity()(features))
        weights = (np.asarray(weight).tobytes() for weight in trunk.weights)
        name = sha256_hex(b"".join([trunk.to_json().encode(), *weights]))
        self.trunks.setdefault(name, trunk)
        return name, rest

    def __call__(
        self, images: UInt8[np.ndarray, "images size size channels"], batch_size: int
    ) -> dict[str, np.ndarray]:
        """Returns each model's outputs for the images, float32 `[images, width]`, by model name."""
        features = {name: outputs(trunk, images, batch_size) for name, trunk in self.trunks.items()}
        return {
            name: self._apply(rest, images if trunk is None else features[trunk], batch_size)
            for name, (trunk, rest) in self._parts.items()
        }


# Baseline that uses the image itself as its embedding; a backbone must outperform it.


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
