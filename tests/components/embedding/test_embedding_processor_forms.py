"""Convolutions and pooling in the forms of a processor: the values and gradients of XLA's own."""

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402

from fedemb.models.processor_forms import for_processor  # noqa: E402

AXES = ("NHWC", "HWIO", "NHWC")
CASES = {
    "same": ((5, 5, 3, 4), {"padding": "SAME"}),
    "valid": ((3, 2, 3, 4), {"padding": "VALID"}),
    "stride": ((3, 3, 3, 4), {"padding": "SAME", "window_strides": (2, 2)}),
    "stride past the kernel": ((1, 1, 3, 4), {"padding": "VALID", "window_strides": (2, 3)}),
    "uneven padding": ((3, 3, 3, 4), {"padding": ((0, 2), (1, 0))}),
    "dilated": ((3, 3, 3, 4), {"padding": "SAME", "rhs_dilation": (2, 3)}),
    "depthwise": ((3, 3, 1, 3), {"padding": "SAME", "feature_group_count": 3}),
    "two kernels for each channel": ((3, 3, 1, 6), {"padding": "SAME", "feature_group_count": 3}),
}


def _convolution(shape, options):
    options = {"window_strides": (1, 1), "dimension_numbers": AXES, **options}
    return shape, lambda x, k: jax.lax.conv_general_dilated(x, k, **options)


def _pooling(window, strides):
    sizes = (1, *window, 1), (1, *strides, 1)
    return (1,), lambda x, k: k * jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, *sizes, "VALID")


FUNCTIONS = {name: _convolution(*case) for name, case in CASES.items()} | {
    "pooling": _pooling((2, 2), (2, 2)),
    "pooling that leaves pixels": _pooling((3, 2), (3, 2)),
    "pooling of a function in jit": (
        (1,),
        lambda x, k: jax.jit(_pooling((2, 2), (2, 2))[1])(jax.nn.relu(x), k),
    ),
}


def _operations(function, *given):
    return {str(e.primitive) for e in jax.make_jaxpr(function)(*given).jaxpr.eqns}


def _inputs(shape, clients=3):
    random = np.random.default_rng(5)
    images = random.normal(size=(clients, 2, 11, 10, 3)).astype(np.float32)
    return images, random.normal(size=(clients, *shape)).astype(np.float32)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_and_gradients_are_those_of_xla(name):
    shape, function = FUNCTIONS[name]
    images, kernels = _inputs(shape)
    formed = for_processor(function)

    def square(given):
        return lambda x, k: jnp.sum(jnp.square(given(x, k)))

    with jax.default_matmul_precision("highest"):
        gradients = tuple(jax.grad(square(f), (0, 1)) for f in (formed, function))
        for pair in ((formed, function), gradients):
            found, wanted = (jax.jit(jax.vmap(f))(images, kernels) for f in pair)
            for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
                np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)
    used = _operations(formed, images[0], kernels[0])
    assert not {"conv_general_dilated", "reduce_window_max"} & used


def test_a_tie_gives_the_gradient_to_the_first_pixel():
    _, function = FUNCTIONS["pooling"]
    ties = jnp.ones((1, 4, 4, 1))
    wanted, found = (
        jax.grad(lambda x, f=f: jnp.sum(f(x, jnp.ones(1))))(ties)
        for f in (function, for_processor(function))
    )
    np.testing.assert_array_equal(found, wanted)


OTHERS = {
    "windows that overlap": _pooling((3, 3), (2, 2)),
    "two groups": _convolution((3, 3, 2, 4), {"padding": "SAME", "feature_group_count": 2}),
    "dilated images": _convolution(
        (3, 3, 4, 4), {"padding": ((1, 1), (1, 1)), "lhs_dilation": (2, 2)}
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_kinds_stay_as_they_are(name):
    shape, function = OTHERS[name]
    given = jnp.ones((2, 8, 8, 4)), jnp.ones(shape)
    assert _operations(for_processor(function), *given) == _operations(function, *given)


def test_an_accelerator_computes_what_the_function_says(monkeypatch):
    function = FUNCTIONS["same"][1]
    assert for_processor(function) is not function
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert for_processor(function) is function
