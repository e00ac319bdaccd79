"""Convolutions and maximum pooling in forms that XLA compiles well for a processor.

On a processor, XLA is slow at the gradient of a convolution inside a loop, at the grouped
convolutions that `vmap` over kernels makes, and at the gradient of pooling. It is fast at matrix
products and slices. Figures: docs/explanation/performance.md.
"""

# The numeric libraries are not fully typed; the project's own signatures are checked.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import jax
    from jax.extend.core import Jaxpr, JaxprEqn, Var

_Slices = tuple[slice, ...]
_ROWS_COLUMNS_CHANNELS = ((0, 3, 1, 2), (3, 2, 0, 1), (0, 3, 1, 2))
"""Axes of images, kernel and result that Keras uses: NHWC, HWIO, NHWC."""


def rewritten_for_cpu(
    function: Callable[[Sequence[jax.Array], jax.Array], jax.Array],
) -> Callable[[Sequence[jax.Array], jax.Array], jax.Array]:
    """Returns a function of weights and images with convolutions and pooling in other forms.

    These are 2-D convolutions and maximum pooling as Keras writes them; other kinds stay as they
    are. The result can be differentiated and vectorized. Where the default device is not a
    processor, the function is returned unchanged.
    """
    import jax

    def computed(weights: Sequence[jax.Array], images: jax.Array) -> jax.Array:
        traced = jax.make_jaxpr(function)(weights, images)
        (found,) = _evaluated(traced.jaxpr, traced.consts, jax.tree.leaves((weights, images)))
        return found

    return computed if jax.default_backend() == "cpu" else function


def _evaluated(
    jaxpr: Jaxpr, constants: Sequence[jax.Array], given: Sequence[jax.Array]
) -> list[jax.Array]:
    """Evaluates a program with its operations replaced, also inside nested `jit`."""
    from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun

    values: dict[Var, jax.Array] = {}
    values.update(zip(jaxpr.constvars, constants, strict=True))
    values.update(zip(jaxpr.invars, given, strict=True))

    def value(atom: Var | Literal) -> jax.Array:
        return atom.val if isinstance(atom, Literal) else values[atom]

    for equation in jaxpr.eqns:
        if _is_convolution(equation):
            images, kernel = map(value, equation.invars)
            results = [_convolution(images, kernel, equation.params)]
        elif _is_pooling(equation):
            results = [_pooled(value(equation.invars[0]), equation.params["window_dimensions"])]
        elif equation.primitive.name == "jit":
            inner: ClosedJaxpr = equation.params["jaxpr"]
            results = _evaluated(inner.jaxpr, inner.consts, [*map(value, equation.invars)])
        else:
            inputs = list(dict.fromkeys(x for x in equation.invars if not isinstance(x, Literal)))
            alone = jaxpr.replace(
                constvars=[], invars=inputs, outvars=equation.outvars, eqns=[equation]
            )
            results = jaxpr_as_fun(ClosedJaxpr(alone, []))(*(values[x] for x in inputs))
        values.update(zip(equation.outvars, results, strict=True))
    return [value(atom) for atom in jaxpr.outvars]


def _shape(atom: Any) -> tuple[int, ...]:
    return atom.aval.shape


def _is_convolution(equation: JaxprEqn) -> bool:
    """Whether this is a convolution of all channels, or of each channel, as Keras writes it."""
    params = equation.params
    if equation.primitive.name != "conv_general_dilated":
        return False
    axes = params["dimension_numbers"]
    images, kernel = map(_shape, equation.invars)
    depthwise = kernel[2] == 1 and params["feature_group_count"] == images[-1]
    return (
        (axes.lhs_spec, axes.rhs_spec, axes.out_spec) == _ROWS_COLUMNS_CHANNELS
        and tuple(params["lhs_dilation"]) == (1, 1)
        and params["batch_group_count"] == 1
        and (params["feature_group_count"] == 1 or depthwise)
    )


def _is_pooling(equation: JaxprEqn) -> bool:
    """Whether this is maximum pooling of images over windows that neither overlap nor leave out."""
    params = equation.params
    if equation.primitive.name != "reduce_window_max":
        return False
    window, shape = params["window_dimensions"], _shape(equation.invars[0])
    return (
        len(shape) == 4
        and tuple(window) == tuple(params["window_strides"])
        and (window[0], window[3]) == (1, 1)
        and not any(map(any, params["padding"]))
        and set(params["base_dilation"]) == set(params["window_dilation"]) == {1}
    )


def _pooled(images: jax.Array, window: Sequence[int]) -> jax.Array:
    """Returns the maximum of each window; on a tie its first pixel gets the whole gradient."""
    import jax.numpy as jnp

    _, rows, columns, _ = window
    height, width = images.shape[1] // rows, images.shape[2] // columns
    images = images[:, : height * rows, : width * columns]
    found = None
    for i in range(rows):
        for j in range(columns):
            pixel = images[:, i::rows, j::columns]
            found = pixel if found is None else jnp.where(found >= pixel, found, pixel)
    assert found is not None, "a window has at least one pixel"
    return found


def _convolution(images: jax.Array, kernel: jax.Array, params: dict[str, Any]) -> jax.Array:
    """Returns a convolution, `[images, rows, columns, outputs]`."""
    import jax
    import jax.numpy as jnp

    padding = [(0, 0, 0), *((low, high, 0) for low, high in params["padding"]), (0, 0, 0)]
    images = jax.lax.pad(images, jnp.zeros((), images.dtype), padding)
    steps, gaps = params["window_strides"], params["rhs_dilation"]
    down, across = (
        _windows(images.shape[1 + axis], kernel.shape[axis], steps[axis], gaps[axis])
        for axis in (0, 1)
    )
    if params["feature_group_count"] == 1:
        return _product(images, kernel, down, across)
    each = kernel.shape[3] // images.shape[3]
    parts = [
        jnp.repeat(images[:, rows, columns], each, axis=3) * kernel[i, j, 0]
        for i, rows in enumerate(down)
        for j, columns in enumerate(across)
    ]
    return sum(parts[1:], parts[0])


def _windows(size: int, length: int, step: int, gap: int) -> _Slices:
    """Returns the pixels along one axis that each row or column of a kernel meets."""
    last = size - (length - 1) * gap
    return tuple(slice(at, at + last, step) for at in range(0, length * gap, gap))


def _product(images: jax.Array, kernel: jax.Array, down: _Slices, across: _Slices) -> jax.Array:
    """Returns a convolution of all channels as one matrix product, without padding.

    Stacks are faster than concatenations, and adding to slices is faster than a sum of padded
    arrays. The gradient makes the patches again: they are as many times larger than the images as
    the kernel has pixels.
    """
    import jax
    import jax.numpy as jnp

    @jax.custom_vjp
    def product(images: jax.Array, kernel: jax.Array) -> jax.Array:
        patches = _patches(images, down, across)
        flat = jnp.matmul(_rows(patches), _rows(kernel))
        return flat.reshape(*patches.shape[:3], -1)

    def forward(images: jax.Array, kernel: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        return product(images, kernel), (images, kernel)

    def backward(kept: tuple[jax.Array, ...], slope: jax.Array) -> tuple[jax.Array, jax.Array]:
        images, kernel = kept
        of_kernel = jnp.matmul(_rows(slope).T, _rows(_patches(images, down, across))).T
        of_patches = jnp.matmul(_rows(slope), _rows(kernel).T).reshape(*slope.shape[:3], -1)
        return _unpatched(of_patches, images.shape, down, across), of_kernel.reshape(kernel.shape)

    product.defvjp(forward, backward)
    return product(images, kernel)


def _rows(values: jax.Array) -> jax.Array:
    return values.reshape(-1, values.shape[-1])


def _patches(images: jax.Array, down: _Slices, across: _Slices) -> jax.Array:
    """Returns what the kernel meets at each pixel, `[images, rows, columns, weights]`."""
    import jax.numpy as jnp

    beside = jnp.stack([images[:, :, columns] for columns in across], 3)
    found = jnp.stack([beside[:, rows] for rows in down], 3)
    return found.reshape(*found.shape[:3], -1)


def _unpatched(slope: jax.Array, shape: Sequence[int], down: _Slices, across: _Slices) -> jax.Array:
    """Returns the gradient of the images, from the gradient of their `_patches`."""
    import jax.numpy as jnp

    count, height, width, channels = shape
    slope = slope.reshape(*slope.shape[:3], len(down), len(across), channels)
    beside = jnp.zeros((count, height, slope.shape[2], len(across), channels), slope.dtype)
    for i, rows in enumerate(down):
        beside = beside.at[:, rows].add(slope[:, :, :, i])
    found = jnp.zeros((count, height, width, channels), slope.dtype)
    for j, columns in enumerate(across):
        found = found.at[:, :, columns].add(beside[:, :, :, j])
    return found
