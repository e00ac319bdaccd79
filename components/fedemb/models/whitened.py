"""Scales features to one size with constants from public or generated images.

Private training adds the same noise to each weight, so its effect on a logit grows with the length
of the features. The largest directions of scattering features (brightness, contrast) are long and
carry little information. Scaled to the size of the others, they cost less, and a linear head
converges in fewer rounds. The constants are weights that never train. They are computed from public
images, or from generated images (`data/dead_leaves.py`) if no public images are available.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

_REACH = 6.0
"""Limit of standardised features, so that unusual images cannot dominate a round."""


def constants(features: np.ndarray, directions: int) -> list[np.ndarray]:
    """Computes the constants of `Whitened` from features of images that are not private.

    Args:
      features: `[images, height, width, channels]`, more images than directions.
      directions: number of largest principal directions scaled to the size of the next direction.

    Returns:
      Mean and inverse standard deviation of each channel, `[channels]`; mean `[dim]`, directions
      `[dim, directions]` and the share kept of each, `[directions]`.
    """
    mean = features.mean((0, 1, 2))
    scale = 1.0 / np.maximum(features.std((0, 1, 2)), 1e-12)
    flat = np.clip((features - mean) * scale, -_REACH, _REACH).reshape(len(features), -1)
    centre = flat.mean(0)
    flat = flat - centre
    values, vectors = np.linalg.eigh(flat @ flat.T)
    largest = np.argsort(-values)[: directions + 1]
    values, vectors = np.maximum(values[largest], 1e-12), vectors[:, largest]
    axes = flat.T @ vectors[:, :directions] / np.sqrt(values[:directions])
    return [mean, scale, centre, axes, np.sqrt(values[-1] / values[:directions])]


@cache
def whitened_layer() -> Any:
    """Returns the layer; the first call registers it with Keras."""
    import keras

    ops: Any = keras.ops

    @keras.saving.register_keras_serializable(package="fedemb")
    class Whitened(keras.layers.Layer):
        """Maps `[batch, height, width, channels]` to vectors of length 1, `[batch, dim]`."""

        def __init__(self, directions: int, **options: Any) -> None:
            super().__init__(**options)
            self.directions = directions

        def get_config(self) -> dict[str, Any]:
            return {**super().get_config(), "directions": self.directions}

        def build(self, input_shape: Any) -> None:
            channels, dim = input_shape[-1], int(np.prod(input_shape[1:]))
            shapes = {
                "mean": (channels,),
                "scale": (channels,),
                "centre": (dim,),
                "axes": (dim, self.directions),
                "kept": (self.directions,),
            }
            self._constants = [
                self.add_weight(
                    name=name,
                    shape=shape,
                    initializer="ones" if name in ("scale", "kept") else "zeros",
                    trainable=False,
                )
                for name, shape in shapes.items()
            ]

        def fit(self, features: np.ndarray) -> None:
            """Computes its constants from `[images, height, width, channels]`; see `constants`."""
            for weight, values in zip(
                self._constants, constants(features, self.directions), strict=True
            ):
                weight.assign(values.astype(np.float32))

        def call(self, inputs: Any) -> Any:
            mean, scale, centre, axes, kept = self._constants
            x = ops.clip((inputs - mean) * scale, -_REACH, _REACH)
            x = ops.reshape(x, (-1, centre.shape[0])) - centre
            x = x - ops.matmul(ops.matmul(x, axes) * (1.0 - kept), ops.transpose(axes))
            length = ops.sqrt(ops.sum(ops.square(x), axis=-1, keepdims=True))
            return x / ops.maximum(length, 1e-6)

        def compute_output_shape(self, input_shape: Any) -> Any:
            return input_shape[0], int(np.prod(input_shape[1:]))

    return Whitened


def fit_constants(backbone: Any, images: np.ndarray) -> int:
    """Computes the constants of each whitened part of a backbone.

    Args:
      backbone: from `build_backbone`.
      images: uint8 `[images, size, size, channels]`, public or generated.

    Returns:
      The number of whitened parts.
    """
    import keras

    from fedemb.models.preprocessing import preprocess

    fitted = 0
    models = [backbone, *[layer for layer in backbone.layers if isinstance(layer, keras.Model)]]
    for model in models:
        for layer in model.layers:
            if not isinstance(layer, whitened_layer()):
                continue
            before = keras.Model(model.input, layer.input)
            pieces = np.array_split(images, max(1, len(images) // 64))
            layer.fit(np.concatenate([np.asarray(before(preprocess(piece))) for piece in pieces]))
            fitted += 1
    return fitted
