"""Group normalisation for training in bfloat16, without whole maps in float32."""

from __future__ import annotations

from functools import cache
from typing import Any

from fedemb.models.arrays import AnyTensor, Layer, Tensor
from fedemb.models.keras_backend import keras_ops

_LEAST_SPREAD = 2.0**-7
"""Minimum variance, as a share of the squared mean; the resolution of bfloat16."""


@cache
def channel_group_norm() -> type[Layer]:
    """Returns the layer; its weights and configuration match Keras's `GroupNormalization`.

    The layer is used only for training and is never saved; the original backbone is saved.
    """
    import keras

    ops = keras_ops()

    class ChannelGroupNorm(keras.layers.GroupNormalization):
        """`GroupNormalization` of maps that keep their type; moments and scales are float32."""

        def call(self, inputs: Any) -> Tensor:
            _, height, width, channels = inputs.shape
            groups, pixels = self.groups, height * width
            maps = ops.cast(inputs, self.compute_dtype)
            flat = ops.reshape(maps, (-1, pixels, channels))
            ones = ops.ones((1, 1, pixels), dtype=flat.dtype)

            def moment(values: AnyTensor) -> AnyTensor:
                sums = ops.cast(ops.matmul(ones, values), "float32")  # fastest way to sum
                sums = ops.reshape(sums, (-1, groups, channels // groups))
                return ops.mean(sums, axis=2, keepdims=True) / pixels

            mean = moment(flat)
            floor = ops.square(mean) * _LEAST_SPREAD
            variance = ops.maximum(moment(ops.square(flat)) - ops.square(mean), floor)
            by_group = (1, groups, channels // groups)
            factor = ops.rsqrt(variance + self.epsilon) * ops.reshape(self.gamma, by_group)
            offset = ops.reshape(self.beta, by_group) - mean * factor
            factor, offset = (
                ops.cast(ops.reshape(part, (-1, 1, 1, channels)), maps.dtype)
                for part in (factor, offset)
            )
            return maps * factor + offset

    return ChannelGroupNorm
