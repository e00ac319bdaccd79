"""The scattering transform: wavelets and absolute values, with no learned and no private values.

Bruna and Mallat (arXiv 1203.1513), two orders, as features of private training (Tramer and Boneh,
arXiv 2011.11660): Morlet wavelets of J octaves and L directions, then a Gaussian mean over 2^J
pixels. Outputs are sampled at the center of each square of 2^J pixels, so that a mirrored image has
mirrored features (`mirrored_paths`).
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np

from fedemb.models.keras_backend import LayerMaker, Tensor, keras_ops

OCTAVES, DIRECTIONS = 2, 8
PATHS = 1 + OCTAVES * DIRECTIONS + DIRECTIONS**2 * OCTAVES * (OCTAVES - 1) // 2
"""Number of values per location and channel: 81."""
_BLUR = 2**OCTAVES
"""Pixels between two outputs, and width of the mirrored border in pixels."""
_SPREAD = 0.8
_FREQUENCY = 0.75 * math.pi
_SLANT = 4.0 / DIRECTIONS


def _morlet(size: int, octave: int, direction: int) -> np.ndarray:
    """Returns a zero-mean wavelet's transfer function on a torus, float64 `[size, size]`."""
    angle = direction * math.pi / DIRECTIONS
    spread, frequency = _SPREAD * 2**octave, _FREQUENCY / 2**octave
    around = np.arange(-2 * size, 3 * size)
    x, y = np.meshgrid(around, around, indexing="ij")
    along = x * math.cos(angle) + y * math.sin(angle)
    across = y * math.cos(angle) - x * math.sin(angle)
    bell = np.exp(-(along**2 + (_SLANT * across) ** 2) / (2 * spread**2))
    wave = bell * np.exp(1j * frequency * along)
    wave = wave - bell * (wave.sum() / bell.sum())
    # The torus is the sum of all periodic copies; the origin is its first pixel.
    wrapped = wave.reshape(5, size, 5, size).sum((0, 2))
    return np.fft.fft2(wrapped * _SLANT / (2 * math.pi * spread**2)).real


def wavelets(size: int) -> np.ndarray:
    """Returns transfer functions with mirrored border, float32 `[J, L, padded, padded]`.

    Args:
      size: pixels of the image without its border.
    """
    padded = size + 2 * _BLUR
    return np.array(
        [
            [_morlet(padded, j, direction) for direction in range(DIRECTIONS)]
            for j in range(OCTAVES)
        ],
        np.float32,
    )


def means(size: int, step: int) -> np.ndarray:
    """Returns Gaussian means along one axis, float32 `[size / 2^J, samples]`.

    Args:
      size: pixels of the image without its mirrored border.
      step: pixels between two samples.
    """
    samples = np.arange(0, size + 2 * _BLUR, step) - _BLUR
    places = _BLUR * np.arange(size // _BLUR) + (_BLUR - 1) / 2
    spread = _SPREAD * 2 ** (OCTAVES - 1)
    bells = np.exp(-((places[:, None] - samples[None, :]) ** 2) / (2 * spread**2))
    return (bells / bells.sum(1, keepdims=True)).astype(np.float32)


def mirrored_paths() -> np.ndarray:
    """Returns the index of each path of a channel in the features of the left-right mirrored image.

    A wavelet of direction l becomes one of direction -l; int64 `[81]`.
    """
    turned = -np.arange(DIRECTIONS) % DIRECTIONS
    first = 1 + DIRECTIONS * np.arange(OCTAVES)[:, None] + turned
    second = 1 + OCTAVES * DIRECTIONS + DIRECTIONS * turned[:, None] + turned
    return np.concatenate([[0], first.ravel(), second.ravel()])


def scatter(images: Tensor, waves: Tensor, every: Tensor, second: Tensor) -> Tensor:
    """Computes the scattering transform of images.

    Args:
      images: float32 `[batch, size, size, channels]`, size a multiple of 4 and at least 8.
      waves: `wavelets(size)`.
      every: `means(size, 1)`.
      second: `means(size, 2)`.

    Returns:
      float32 `[batch, size / 4, size / 4, channels * 81]`, with the 81 paths of a channel adjacent:
      mean, then first order by octave and direction, then second order.
    """
    ops = keras_ops()
    shape: Any = images.shape
    size, channels = shape[1], shape[3]
    border = [[0, 0], [0, 0], [_BLUR, _BLUR], [_BLUR, _BLUR]]
    x = ops.pad(ops.transpose(images, (0, 3, 1, 2)), border, mode="reflect")

    def spectrum(signal: Any) -> Any:
        return ops.fft2((signal, ops.zeros_like(signal)))

    def filtered(of: Any, transfer: Any, halve: bool) -> Any:
        """Returns absolute values after a wavelet, at every or every second pixel."""
        parts = tuple(part[..., None, :, :] * transfer for part in of)
        if halve:  # Folding the spectrum samples every second pixel.
            half = transfer.shape[-1] // 2
            lead = ops.shape(parts[0])[:-2]
            parts = tuple(
                ops.sum(ops.reshape(part, (*lead, 2, half, 2, half)), axis=(-4, -2)) / 4.0
                for part in parts
            )
        real, imaginary = ops.ifft2(parts)
        return ops.sqrt(ops.square(real) + ops.square(imaginary))

    def mean(signal: Any, along: Any) -> Any:
        return ops.matmul(ops.matmul(along, signal), ops.transpose(along))

    of_image = spectrum(x)
    fine = filtered(of_image, waves[0], halve=False)
    coarse = filtered(of_image, waves[1], halve=True)
    both = filtered(spectrum(fine), waves[1], halve=True)
    out = size // _BLUR
    orders = [
        mean(x, every)[:, :, None],
        mean(fine, every),
        mean(coarse, second),
        ops.reshape(mean(both, second), (-1, channels, DIRECTIONS**2, out, out)),
    ]
    paths = ops.reshape(ops.concatenate(orders, axis=2), (-1, channels * PATHS, out, out))
    return ops.transpose(paths, (0, 2, 3, 1))


def shared_with_mirror(features: Tensor) -> Tensor:
    """Returns the left half of the mean of features and mirrored features; both halves match.

    Args:
      features: from `scatter`, with an even number of columns.
    """
    ops = keras_ops()
    shape: Any = features.shape
    channels, columns = shape[-1] // PATHS, shape[2]
    turned = (PATHS * np.arange(channels)[:, None] + mirrored_paths()).ravel()
    mirrored = ops.take(ops.flip(features, axis=2), turned, axis=-1)
    return ((features + mirrored) / 2.0)[:, :, : columns // 2]


@cache
def scattering_layer() -> LayerMaker:
    """Returns the layer; the first call registers it with Keras."""
    import keras

    @keras.saving.register_keras_serializable(package="fedemb")
    class Scattering(keras.layers.Layer):
        """`scatter` as a layer.

        Its filters are weights that never train, so that a check of a released graph finds each
        constant in the list of weights.
        """

        def __init__(self, mirrored: bool = False, **options: Any) -> None:
            super().__init__(**options)
            self.mirrored = mirrored

        def get_config(self) -> dict[str, object]:
            return {**super().get_config(), "mirrored": self.mirrored}

        def build(self, input_shape: tuple[int, ...]) -> None:
            size = input_shape[1]
            filters = (wavelets(size), means(size, 1), means(size, 2))
            names = ("wavelets", "means", "coarse_means")
            self._filters = [
                self.add_weight(
                    name=name,
                    shape=values.shape,
                    initializer=lambda shape, dtype, values=values: keras.ops.cast(values, dtype),
                    trainable=False,
                )
                for name, values in zip(names, filters, strict=True)
            ]

        def call(self, inputs: Tensor) -> Tensor:
            found = scatter(inputs, *self._filters)
            return shared_with_mirror(found) if self.mirrored else found

        def compute_output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
            batch, height, width, channels = input_shape
            columns = width // _BLUR // (2 if self.mirrored else 1)
            return batch, height // _BLUR, columns, channels * PATHS

    return Scattering
