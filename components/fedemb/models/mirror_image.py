"""A layer that mirrors an image: swaps left and right."""

from __future__ import annotations

from functools import cache
from typing import Any


@cache
def mirror_layer() -> Any:
    """Returns the layer; the first call registers it with Keras.

    Keras's own operation accepts any axis, including the batch axis, so a file with it would need
    inspection; this layer has no setting.
    """
    import keras

    ops: Any = keras.ops

    @keras.saving.register_keras_serializable(package="fedemb")
    class MirrorImage(keras.layers.Layer):
        """Maps `[batch, height, width, channels]` to the same shape."""

        def call(self, inputs: Any) -> Any:
            return ops.flip(inputs, axis=2)

        def compute_output_shape(self, input_shape: Any) -> Any:
            return input_shape

    return MirrorImage
