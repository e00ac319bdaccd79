"""A layer that mirrors an image: swaps left and right."""

from __future__ import annotations

from functools import cache

from fedemb.models.arrays import LayerMaker, Tensor
from fedemb.models.keras_backend import keras_ops


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
