"""Convolutions with standardised weights, and their conversion to plain convolutions.

Weight standardisation (arXiv 1903.10520; in private training arXiv 2204.13650, +1.2 points in
addition to GroupNorm) computes with `(w - mean) / sqrt(fan_in x variance + eps)` of each output
channel instead of the stored kernel. It is used only in training: the released model has the
standardised kernels in ordinary layers, so that it loads without this file.
"""

from __future__ import annotations

import math
from collections.abc import MutableMapping
from functools import cache
from typing import Any

import numpy as np

from fedemb.models.arrays import AnyTensor, Layer, Model, Tensor
from fedemb.models.keras_backend import keras_ops

EPSILON = 1e-5
GAIN_EPSILON = 1e-4
"""Minimum `fan_in x variance` of a channel with a gain (jax_privacy v0.1, `WSConv2D`)."""


def standardize(kernel: AnyTensor, gain: AnyTensor | None = None) -> AnyTensor:
    """Returns the kernel `[height, width, in, out]` with mean 0 in each output channel.

    Args:
      kernel: stored kernel.
      gain: `[out]`, norm of each output channel; None means 1.
    """
    ops = keras_ops()
    exact = ops.cast(kernel, "float32")
    mean = ops.mean(exact, axis=(0, 1, 2), keepdims=True)
    variance = ops.var(exact, axis=(0, 1, 2), keepdims=True)
    square = math.prod(ops.shape(kernel)[:3]) * variance
    if gain is None:
        scaled = (exact - mean) * ops.rsqrt(square + EPSILON)
    else:
        scaled = (exact - mean) * (
            ops.rsqrt(ops.maximum(square, GAIN_EPSILON)) * ops.cast(gain, "float32")
        )
    return ops.cast(scaled, kernel.dtype)


@cache
def standardized_convolution() -> type[Layer]:
    """Returns the layer; the first call registers it with Keras."""
    import keras

    @keras.saving.register_keras_serializable(package="fedemb")
    class StandardizedConv2D(keras.layers.Conv2D):
        """`Conv2D` with a standardised kernel."""

        def convolution_op(self, inputs: Any, kernel: Any) -> Any:
            return super().convolution_op(inputs, standardize(kernel))

        def plain_weights(self) -> list[np.ndarray]:
            """Returns the weights of the equivalent ordinary layer."""
            kernel = np.asarray(standardize(self.kernel))
            return [kernel, *self.get_weights()[1:]]

    return StandardizedConv2D


@cache
def gain_convolution() -> type[Layer]:
    """Returns the layer with a gain per channel; the first call registers it with Keras."""
    import keras

    @keras.saving.register_keras_serializable(package="fedemb")
    class GainConv2D(keras.layers.Conv2D):
        """`Conv2D` with a standardised kernel scaled by a trained gain."""

        def build(self, input_shape: tuple[int, ...]) -> None:
            super().build(input_shape)
            self.gain = self.add_weight(name="gain", shape=(self.filters,), initializer="ones")

        # `Conv2D` saves and loads only its own weights, by index.
        def save_own_variables(self, store: MutableMapping[str, Tensor]) -> None:
            super().save_own_variables(store)
            store["gain"] = self.gain

        def load_own_variables(self, store: MutableMapping[str, Tensor]) -> None:
            super().load_own_variables(store)
            self.gain.assign(store["gain"])

        def convolution_op(self, inputs: Any, kernel: Any) -> Any:
            return super().convolution_op(inputs, standardize(kernel, self.gain))

        def plain_weights(self) -> list[np.ndarray]:
            """Returns the weights of the equivalent ordinary layer."""
            kernel = np.asarray(standardize(self.kernel, self.gain))
            return [kernel, *(self.get_weights()[1:2] if self.use_bias else [])]

    return GainConv2D


def plain_form(backbone: Model) -> Model:
    """Returns the same function with ordinary convolutions, for release.

    Args:
      backbone: trained backbone; returned unchanged without a standardised convolution.
    """
    import keras

    special = (standardized_convolution(), gain_convolution())
    if not any(isinstance(layer, special) for layer in backbone.layers):
        return backbone

    def plain(layer: Layer) -> Layer:
        kind = keras.layers.Conv2D if isinstance(layer, special) else type(layer)
        return kind.from_config(layer.get_config())

    copy = keras.models.clone_model(backbone, clone_function=plain)
    for source, target in zip(backbone.layers, copy.layers, strict=True):
        standardised = isinstance(source, special)
        target.set_weights(source.plain_weights() if standardised else source.get_weights())
    return copy
