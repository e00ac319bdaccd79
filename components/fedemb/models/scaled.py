"""Layers that scale: those inside of ConvNeXt and InceptionResNetV2.

Keras keeps its own versions private, so a file with them could not be loaded without Keras's
modules of applications. These layers have the same names, settings and weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from fedemb.models.arrays import AnyTensor, LayerMaker


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
