"""Convolutions with standardised weights, and the plain convolutions they turn into at the end.

Weight standardisation (arXiv 1903.10520; in private training arXiv 2204.13650, +1.2 points beside
GroupNorm) computes with `(w - mean) / sqrt(fan_in x variance + eps)` of each output channel in
place of the stored kernel. It is a way to train: the released model holds the standardised kernels
in ordinary layers, so that nobody needs this file to load it.
"""

from __future__ import annotations

from functools import cache
from typing import Any

EPSILON = 1e-5


def standardize(kernel: Any) -> Any:
    """Kernel `[height, width, in, out]` with mean 0 and squared norm 1 in each output channel."""
    from keras import ops

    exact = ops.cast(kernel, "float32")
    mean = ops.mean(exact, axis=(0, 1, 2), keepdims=True)
    variance = ops.var(exact, axis=(0, 1, 2), keepdims=True)
    fan_in = kernel.shape[0] * kernel.shape[1] * kernel.shape[2]
    scaled = (exact - mean) * ops.rsqrt(fan_in * variance + EPSILON)
    return ops.cast(scaled, kernel.dtype)


@cache
def standardized_convolution() -> Any:
    """The layer, known to Keras by name from the first call on."""
    import keras

    @keras.saving.register_keras_serializable(package="fedemb")
    class StandardizedConv2D(keras.layers.Conv2D):
        """`Conv2D` that computes with its kernel standardised."""

        def convolution_op(self, inputs: Any, kernel: Any) -> Any:
            return super().convolution_op(inputs, standardize(kernel))

    return StandardizedConv2D


def plain_form(backbone: Any) -> Any:
    """The same function with ordinary convolutions: what is released.

    Args:
      backbone: trained; returned as it is if it has no standardised convolution.
    """
    import keras

    special = standardized_convolution()
    if not any(isinstance(layer, special) for layer in backbone.layers):
        return backbone

    def plain(layer: Any) -> Any:
        kind = keras.layers.Conv2D if isinstance(layer, special) else type(layer)
        return kind.from_config(layer.get_config())

    copy = keras.models.clone_model(backbone, clone_function=plain)
    for source, target in zip(backbone.layers, copy.layers, strict=True):
        weights = source.get_weights()
        if isinstance(source, special):
            weights[0] = keras.ops.convert_to_numpy(standardize(source.kernel))
        target.set_weights(weights)
    return copy
