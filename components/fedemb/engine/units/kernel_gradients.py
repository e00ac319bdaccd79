"""Gradients of convolution kernels, one for each unit of a micro-batch.

`tf.vectorized_map` calls the library once per unit, with an overhead of about 30 µs per call. For
small convolutions, compiled products of shifted images and gradients of all units take a tenth to
two thirds of that time (`tests/benchmarks/README.md`). In both cases a sum contains one unit only.

The table of converters is internal to TensorFlow. Its version is pinned, and a test compares this
module with TensorFlow's gradients of single units.
"""

# TensorFlow, Keras, JAX and SciPy are not fully typed; the project's own signatures are checked.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from functools import cache
from typing import Any

_OPERATION = "Conv2DBackpropFilter"
MOST_PRODUCTS = 1_500_000
"""Multiplications per unit and kernel above which the library is faster."""
FEWEST_UNITS = 16
"""Minimum number of units for which compilation pays off."""


@contextmanager
def kernel_gradients_at_once() -> Generator[None]:
    """While entered, `tf.vectorized_map` computes small kernel gradients of all units at once."""
    from tensorflow.python.ops.parallel_for import pfor

    converters: dict[str, Any] = pfor._pfor_converter_registry
    one_by_one = converters[_OPERATION]

    def convert(call: Any) -> Any:
        call.stack_inputs(stack_indices=[2])
        images, stacked, _ = call.input(0)
        gradients, kernel = call.stacked_input(2), _static(call.unstacked_input(1))
        if not stacked or kernel is None or not _is_small(call, images, gradients, kernel):
            return one_by_one(call)
        strides = tuple(call.get_attr("strides")[1:3])
        same = call.get_attr("padding") == b"SAME"
        taken = _products()(images, gradients, kernel=kernel[:2], strides=strides, same=same)
        return [pfor.wrap(taken, True)]

    converters[_OPERATION] = convert
    try:
        yield
    finally:
        converters[_OPERATION] = one_by_one


def _static(tensor: Any) -> tuple[int, ...] | None:
    import tensorflow as tf

    value = tf.get_static_value(tensor)
    return None if value is None else tuple(int(n) for n in value)


def _is_small(call: Any, images: Any, gradients: Any, kernel: tuple[int, ...]) -> bool:
    plain = (
        images.shape[0] is not None
        and images.shape[0] >= FEWEST_UNITS
        and call.get_attr("data_format") == b"NHWC"
        and set(call.get_attr("dilations")) == {1}
        and call.get_attr("padding") in {b"SAME", b"VALID"}
        and images.shape[2:].is_fully_defined()
        and gradients.shape[1:].is_fully_defined()
    )
    if not plain:
        return False
    places = gradients.shape[1] * gradients.shape[2] * gradients.shape[3]
    return places * kernel[0] * kernel[1] * kernel[2] * kernel[3] <= MOST_PRODUCTS


@cache
def _products() -> Any:
    import tensorflow as tf

    def gradients_of_kernels(
        images: Any,
        gradients: Any,
        *,
        kernel: tuple[int, int],
        strides: tuple[int, int],
        same: bool,
    ) -> Any:
        """Float32 `[units, height, width, in, out]`.

        Args:
          images: float32 `[units, images, rows, columns, in]`.
          gradients: of the outputs, float32 `[units, images, rows, columns, out]`.
          kernel: its height and width.
          strides: by rows and columns.
          same: zeros stand around the images, as TensorFlow lays them for "SAME".
        """
        units, looks, rows, columns, depth = images.shape
        sizes = gradients.shape[2:4]
        reach = [(o - 1) * s + k for o, s, k in zip(sizes, strides, kernel, strict=True)]
        if same:
            missing = [max(r - n, 0) for r, n in zip(reach, (rows, columns), strict=True)]
            around = [[m // 2, m - m // 2] for m in missing]
            images = tf.pad(images, [[0, 0], [0, 0], *around, [0, 0]])
        outputs = tf.reshape(gradients, [units, -1, gradients.shape[4]])
        taken = []
        for row in range(kernel[0]):
            for column in range(kernel[1]):
                shifted = images[
                    :,
                    :,
                    row : row + reach[0] - kernel[0] + 1 : strides[0],
                    column : column + reach[1] - kernel[1] + 1 : strides[1],
                ]
                inputs = tf.reshape(shifted, [units, looks * sizes[0] * sizes[1], depth])
                taken.append(tf.matmul(inputs, outputs, transpose_a=True))
        shape = [units, *kernel, depth, gradients.shape[4]]
        return tf.reshape(tf.stack(taken, axis=1), shape)

    return tf.function(gradients_of_kernels, jit_compile=True, autograph=False)
