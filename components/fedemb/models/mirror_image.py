"""An image seen in a mirror, as a layer: left and right change places, and nothing else does."""

from __future__ import annotations

from functools import cache
from typing import Any


@cache
def mirror_layer() -> Any:
    """The layer, known to Keras by name from the first call on.

    Keras's own operation takes any axis, that of the images of a batch too, so that one in a file
    would have to be looked at; this one has no setting.
    """
    import keras

    ops: Any = keras.ops

    @keras.saving.register_keras_serializable(package="fedemb")
    class MirrorImage(keras.layers.Layer):
        """`[batch, height, width, channels]` to the same shape."""

        def call(self, inputs: Any) -> Any:
            return ops.flip(inputs, axis=2)

        def compute_output_shape(self, input_shape: Any) -> Any:
            return input_shape

    return MirrorImage
