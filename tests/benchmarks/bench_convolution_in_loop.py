"""The gradient of a convolution's kernel on one core, under XLA: alone, in a loop, side by side.

    python -m tests.benchmarks.bench_convolution_in_loop

Four steps each, in processor time a step and client; with the axes as JAX leaves them, and put by
hand into the order that XLA has fast code for.
"""

import os
import time

from tests.benchmarks.tiny import TINY

CLIENTS, STEPS, REPEATS = 2, 4, 3
SIDE = 4 if TINY else 14
AXES = ("NHWC", "HWIO", "NHWC")


def _milliseconds(function, *given, clients):
    import jax

    compiled, times = jax.jit(function), []
    for _ in range(1 + REPEATS):
        started = time.process_time()
        jax.block_until_ready(compiled(*given))
        times.append(time.process_time() - started)
    return 1e3 * min(times[1:]) / STEPS / clients


def _in_order():
    """A convolution whose gradients are convolutions over the same axes."""
    import jax
    import jax.numpy as jnp

    def convolve(images, kernel, padding):
        return jax.lax.conv_general_dilated(images, kernel, (1, 1), padding, dimension_numbers=AXES)

    @jax.custom_vjp
    def ordered(images, kernel):
        return convolve(images, kernel, "SAME")

    def forward(images, kernel):
        return ordered(images, kernel), (images, kernel)

    def backward(kept, slope):
        images, kernel = kept
        beside = [(kernel.shape[0] // 2,) * 2] * 2
        turned = jnp.flip(kernel, (0, 1)).transpose(0, 1, 3, 2)
        of_kernel = convolve(images.transpose(3, 1, 2, 0), slope.transpose(1, 2, 0, 3), beside)
        return convolve(slope, turned, "SAME"), of_kernel.transpose(1, 2, 0, 3)

    ordered.defvjp(forward, backward)
    return lambda images, kernel: convolve(images, kernel, "SAME"), ordered


def main():
    """See the module."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    import jax
    import jax.numpy as jnp

    images = jnp.ones((CLIENTS, 32, SIDE, SIDE, 32))
    kernels = jnp.full((CLIENTS, 5, 5, 32, 64), 0.01)
    for name, convolution in zip(("as they are", "in order"), _in_order(), strict=True):

        def step(_index, kernel, images, convolution=convolution):
            loss = lambda kernel: jnp.sum(jnp.tanh(convolution(images, kernel)))  # noqa: E731
            return kernel - 1e-3 * jax.grad(loss)(kernel)

        def unrolled(kernel, images, step=step):
            for index in range(STEPS):
                kernel = step(index, kernel, images)
            return kernel

        def looped(kernel, images, step=step):
            return jax.lax.fori_loop(0, STEPS, lambda i, k: step(i, k, images), kernel)

        one = kernels[0], images[0]
        found = {
            "no loop": _milliseconds(unrolled, *one, clients=1),
            "loop": _milliseconds(looped, *one, clients=1),
            "loop, two clients": _milliseconds(jax.vmap(looped), kernels, images, clients=CLIENTS),
        }
        print(f"axes {name}:", *(f"{place} {ms:.0f} ms" for place, ms in found.items()))  # noqa: T201


if __name__ == "__main__":
    main()
