"""Gradients of a convolution's kernel for 64 units: the library unit by unit, and all at once.

    python -m tests.benchmarks.bench_kernel_gradients

The eight convolutions of ResNet-8 at 32x32, one image a unit, one core; processor milliseconds,
medians of nine. `fedemb.engine.units.kernel_gradients` takes all at once where a unit needs at most
`MOST_PRODUCTS` multiplications.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

from tests.benchmarks.tiny import TINY

UNITS = 2 if TINY else 64
LAYERS = (
    (32, 3, 16, 3, 1),
    (32, 16, 16, 3, 1),
    (32, 16, 32, 3, 2),
    (32, 16, 32, 1, 2),
    (16, 32, 32, 3, 1),
    (16, 32, 64, 3, 2),
    (16, 32, 64, 1, 2),
    (8, 64, 64, 3, 1),
)
"""Rows of the images, channels in and out, kernel, stride."""


def _milliseconds(act: Callable[[], Any]) -> float:
    seconds = []
    for _ in range(11):
        start = time.process_time()
        act()
        seconds.append(time.process_time() - start)
    return 1000 * sorted(seconds[2:])[4]


def main() -> None:
    """See the module."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import numpy as np
    import tensorflow as tf

    from fedemb.engine.units import kernel_gradients

    tf.get_logger().setLevel("ERROR")
    random = np.random.default_rng(0)
    for rows, depth, channels, kernel, stride in LAYERS:
        places = -(-rows // stride)
        shape = (kernel, kernel, depth, channels)
        images = tf.constant(random.normal(size=(UNITS, 1, rows, rows, depth)), tf.float32)
        outputs = tf.constant(random.normal(size=(UNITS, 1, places, places, channels)), tf.float32)

        @tf.function
        def one_by_one(images: Any = images, outputs: Any = outputs, shape: Any = shape) -> Any:
            def of_one(unit: Any) -> Any:
                return tf.raw_ops.Conv2DBackpropFilter(
                    input=unit[0],
                    filter_sizes=shape,
                    out_backprop=unit[1],
                    strides=[1, stride, stride, 1],  # noqa: B023 - traced in this turn
                    padding="SAME",
                )

            return tf.vectorized_map(of_one, (images, outputs))

        def at_once(images: Any = images, outputs: Any = outputs, kernel: int = kernel) -> Any:
            return kernel_gradients._products()(
                images,
                outputs,
                kernel=(kernel, kernel),
                strides=(stride, stride),  # noqa: B023 - called in this turn
                same=True,
            )

        products = places * places * kernel * kernel * depth * channels
        taken = "at once" if products <= kernel_gradients.MOST_PRODUCTS else "one by one"
        sys.stdout.write(
            f"{rows}x{rows}, {depth} to {channels}, {kernel}x{kernel}, stride {stride}: one by one "
            f"{_milliseconds(one_by_one):.2f} ms, at once {_milliseconds(at_once):.2f} ms; "
            f"{products:,} multiplications: {taken}\n"
        )


if __name__ == "__main__":
    main()
