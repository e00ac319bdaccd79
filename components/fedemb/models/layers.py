"""Layers of our own: standardised convolutions, whitening, mirror images, lean group norm."""

from __future__ import annotations

import math
from collections.abc import MutableMapping, Sequence
from functools import cache
from typing import Any

import numpy as np

from fedemb.models.keras_backend import (
    AnyTensor,
    Layer,
    LayerMaker,
    Model,
    Tensor,
    Variable,
    keras_ops,
)

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
        """`Conv2D` with a standardised kernel; with `scaled`, times a trained gain per channel."""

        def __init__(self, *settings: Any, scaled: bool = False, **options: Any) -> None:
            super().__init__(*settings, **options)
            self.scaled, self.gain = scaled, None

        def get_config(self) -> dict[str, object]:
            return {**super().get_config(), "scaled": self.scaled}

        def build(self, input_shape: tuple[int, ...]) -> None:
            super().build(input_shape)
            if self.scaled:
                self.gain = self.add_weight(name="gain", shape=(self.filters,), initializer="ones")

        # `Conv2D` saves and loads only its own weights, by index.
        def save_own_variables(self, store: MutableMapping[str, Tensor]) -> None:
            super().save_own_variables(store)
            if self.gain is not None:
                store["gain"] = self.gain

        def load_own_variables(self, store: MutableMapping[str, Tensor]) -> None:
            super().load_own_variables(store)
            if self.gain is not None:
                self.gain.assign(store["gain"])

        def convolution_op(self, inputs: Any, kernel: Any) -> Any:
            return super().convolution_op(inputs, standardize(kernel, self.gain))

        def plain_weights(self) -> list[np.ndarray]:
            """Returns the weights of the equivalent ordinary layer."""
            kernel = np.asarray(standardize(self.kernel, self.gain))
            return [kernel, *(self.get_weights()[1:2] if self.use_bias else [])]

    return StandardizedConv2D


def plain_form(backbone: Model) -> Model:
    """Returns the same function with ordinary convolutions, for release.

    Args:
      backbone: trained backbone; returned unchanged without a standardised convolution.
    """
    import keras

    special = standardized_convolution()
    if not any(isinstance(layer, special) for layer in backbone.layers):
        return backbone

    def plain(layer: Layer) -> Layer:
        settings = layer.get_config()
        standardised = settings.pop("scaled", None) is not None
        kind = keras.layers.Conv2D if standardised else type(layer)
        return kind.from_config(settings)

    copy = keras.models.clone_model(backbone, clone_function=plain)
    for source, target in zip(backbone.layers, copy.layers, strict=True):
        standardised = isinstance(source, special)
        target.set_weights(source.plain_weights() if standardised else source.get_weights())
    return copy


# Scales features to one size with constants from public or drawn images.
#
# Private training adds the same noise to each weight, so its effect on a logit grows with the
# length of the features. The largest directions of scattering features (brightness, contrast) are
# long and carry little information. Scaled to the size of the others, they cost less, and a
# linear head converges in fewer rounds. The constants are weights that never train. They are
# computed from public images, or from drawn images (`data/builtin.py`) if no public images
# are available.


_REACH = 6.0
"""Limit of standardised features, so that unusual images cannot dominate a round."""


def constants(
    features: np.ndarray, directions: int, *, one_scale: bool = False, power: float = 1.0
) -> list[np.ndarray]:
    """Computes the constants of `Whitened` from features of images that are not private.

    Args:
      features: `[images, height, width, channels]`, more images than directions.
      directions: number of largest principal directions scaled to the size of the next direction.
      one_scale: whether all channels have the same scale, instead of their own.
      power: power of the factors that give all directions one size; 0 keeps their sizes.

    Returns:
      Mean and inverse standard deviation of each channel, `[channels]`; mean `[dim]`, directions
      `[dim, directions]` and the share kept of each, `[directions]`.
    """
    mean = features.mean((0, 1, 2))
    deviation = features.std((0, 1, 2))
    if one_scale:
        deviation = np.full_like(deviation, np.sqrt(np.mean(deviation**2)))
    scale = 1.0 / np.maximum(deviation, 1e-12)
    flat = np.clip((features - mean) * scale, -_REACH, _REACH).reshape(len(features), -1)
    centre = flat.mean(0)
    flat = flat - centre
    wide = flat.shape[1] >= len(flat)
    values, vectors = np.linalg.eigh(flat @ flat.T if wide else flat.T @ flat)
    largest = np.argsort(-values)[: directions + 1]
    values, vectors = np.maximum(values[largest], 1e-12), vectors[:, largest]
    axes = vectors[:, :directions]
    if wide:
        axes = flat.T @ axes / np.sqrt(values[:directions])
    return [mean, scale, centre, axes, (values[-1] / values[:directions]) ** (power / 2)]


def _weights(channels: int, dim: int, directions: int) -> list[tuple[str, tuple[int, ...], str]]:
    """Returns name, shape and initializer of each constant, in the order of `constants`."""
    return [
        ("mean", (channels,), "zeros"),
        ("scale", (channels,), "ones"),
        ("centre", (dim,), "zeros"),
        ("axes", (dim, directions), "zeros"),
        ("kept", (directions,), "ones"),
    ]


def _whitened(features: AnyTensor, weights: Sequence[Variable], *, reduce: bool) -> AnyTensor:
    """Returns the vectors of `Whitened` for features and its constants."""
    ops = keras_ops()
    mean, scale, centre, axes, kept = weights
    x = ops.clip((features - mean) * scale, -_REACH, _REACH)
    x = ops.reshape(x, (-1, centre.shape[0])) - centre
    if reduce:
        x = ops.matmul(x, axes) * kept
    else:
        x = x - ops.matmul(ops.matmul(x, axes) * (1.0 - kept), ops.transpose(axes))
    length = ops.sqrt(ops.sum(ops.square(x), axis=-1, keepdims=True))
    return x / ops.maximum(length, 1e-6)


def _rooted(inputs: AnyTensor) -> AnyTensor:
    ops = keras_ops()
    # On JAX, the gradient of the square root is not finite at 0.
    return ops.sign(inputs) * ops.sqrt(ops.maximum(ops.abs(inputs), 1e-12))


@cache
def whitened_layer() -> type[Layer]:
    """Returns the layer; the first call registers it with Keras."""
    import keras

    @keras.saving.register_keras_serializable(package="fedemb")
    class Whitened(keras.layers.Layer):
        """Maps `[batch, height, width, channels]` to vectors of length 1, `[batch, dim]`.

        Args:
          directions: number of scaled directions.
          reduce: whether to return only the coordinates along these directions.
          square_root: whether to take square roots of the inputs, with their signs.
          options: options of a layer.
        """

        def __init__(
            self, directions: int, reduce: bool = False, square_root: bool = False, **options: Any
        ) -> None:
            super().__init__(**options)
            self.directions, self.reduce, self.square_root = directions, reduce, square_root

        def get_config(self) -> dict[str, object]:
            added = {"reduce": self.reduce, "square_root": self.square_root}
            used = {name: True for name, value in added.items() if value}
            return {**super().get_config(), "directions": self.directions, **used}

        def build(self, input_shape: tuple[int, ...]) -> None:
            channels, dim = input_shape[-1], int(np.prod(input_shape[1:]))
            self._constants = [
                self.add_weight(name=name, shape=shape, initializer=initial, trainable=False)
                for name, shape, initial in _weights(channels, dim, self.directions)
            ]

        def call(self, inputs: AnyTensor) -> AnyTensor:
            rooted = _rooted(inputs) if self.square_root else inputs
            return _whitened(rooted, self._constants, reduce=self.reduce)

        def compute_output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
            return input_shape[0], self.directions if self.reduce else int(np.prod(input_shape[1:]))

    return Whitened


# A layer that mirrors an image: swaps left and right.


@cache
def mirror_layer() -> LayerMaker:
    """Returns the layer; the first call registers it with Keras.

    Keras's own operation accepts any axis, including the batch axis, so a file with it would need
    inspection; this layer has no setting.
    """
    import keras

    ops = keras_ops()

    @keras.saving.register_keras_serializable(package="fedemb")
    class MirrorImage(keras.layers.Layer):
        """Maps `[batch, height, width, channels]` to the same shape."""

        def call(self, inputs: Tensor) -> Tensor:
            return ops.flip(inputs, axis=2)

        def compute_output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
            return input_shape

    return MirrorImage
