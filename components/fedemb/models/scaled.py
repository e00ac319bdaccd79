"""Layers that scale: those inside of ConvNeXt, InceptionResNetV2 and vision transformers.

Keras keeps its own versions private, so a file with them could not be loaded without Keras's
modules of applications. These layers have the same names, settings and weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from fedemb.models.arrays import AnyTensor, LayerMaker
from fedemb.models.keras_backend import keras_ops


@cache
def scaled_layers() -> dict[str, LayerMaker]:
    """Returns the layers by the name that files use; the first call registers them with Keras."""
    import keras

    @keras.saving.register_keras_serializable(package="fedemb")
    class LayerScale(keras.layers.Layer):
        """Multiplies each channel, the last axis, by a trained factor."""

        def __init__(self, init_values: float, projection_dim: int, **options: Any) -> None:
            super().__init__(**options)
            self.init_values, self.projection_dim = init_values, projection_dim

        def build(self, input_shape: tuple[int, ...]) -> None:
            self.gamma = self.add_weight(
                name="gamma",
                shape=(self.projection_dim,),
                initializer=keras.initializers.Constant(self.init_values),
            )

        def call(self, inputs: AnyTensor) -> AnyTensor:
            return inputs * self.gamma

        def get_config(self) -> dict[str, object]:
            own = {"init_values": self.init_values, "projection_dim": self.projection_dim}
            return {**super().get_config(), **own}

        def compute_output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
            return input_shape

    @keras.saving.register_keras_serializable(package="fedemb")
    class CustomScaleLayer(keras.layers.Layer):
        """Adds a second input, times a constant, to the first."""

        def __init__(self, scale: float, **options: Any) -> None:
            super().__init__(**options)
            self.scale = scale

        def call(self, inputs: Sequence[AnyTensor]) -> AnyTensor:
            first, second = inputs
            return first + second * self.scale

        def get_config(self) -> dict[str, object]:
            return {**super().get_config(), "scale": self.scale}

        def compute_output_shape(self, input_shape: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
            return input_shape[0]

    return {"LayerScale": LayerScale, "CustomScaleLayer": CustomScaleLayer}


@cache
def token_layer() -> LayerMaker:
    """Returns the layer of a transformer's tokens; the first call registers it with Keras."""
    import keras

    ops = keras_ops()

    @keras.saving.register_keras_serializable(package="fedemb")
    class ClassToken(keras.layers.Layer):
        """Puts a trained class token before the patches and adds a trained position to each.

        Maps `[batch, patches, channels]` to `[batch, patches + 1, channels]`.
        """

        def build(self, input_shape: tuple[int, ...]) -> None:
            patches, channels = input_shape[1:]
            self.token = self.add_weight(name="token", shape=(1, 1, channels))
            self.positions = self.add_weight(name="positions", shape=(1, patches + 1, channels))

        def call(self, inputs: AnyTensor) -> AnyTensor:
            token = ops.broadcast_to(self.token, (ops.shape(inputs)[0], 1, inputs.shape[-1]))
            return ops.concatenate([token, inputs], axis=1) + self.positions

        def compute_output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
            batch, patches, channels = input_shape
            return batch, patches + 1, channels

    return ClassToken


@cache
def first_token_layer() -> LayerMaker:
    """Returns the layer that keeps the class token; the first call registers it with Keras."""
    import keras

    @keras.saving.register_keras_serializable(package="fedemb")
    class FirstToken(keras.layers.Layer):
        """Maps `[batch, tokens, channels]` to the first token, `[batch, channels]`."""

        def call(self, inputs: AnyTensor) -> AnyTensor:
            return inputs[:, 0]

        def compute_output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
            return input_shape[0], input_shape[2]

    return FirstToken
