"""Gradients of kernels taken at once are those that TensorFlow takes of one unit alone."""

import numpy as np
import pytest
import tensorflow as tf

from fedemb.engine import units as kernel_gradients
from fedemb.engine.units import FEWEST_UNITS, kernel_gradients_at_once

UNITS = FEWEST_UNITS
LAYERS = {
    "stem": ((2, 9, 9, 3), (3, 3, 3, 8), (1, 1), "SAME"),
    "even kernel, stride": ((1, 12, 12, 4), (6, 6, 4, 8), (2, 2), "SAME"),
    "strides differ": ((1, 11, 8, 4), (3, 2, 4, 5), (3, 1), "SAME"),
    "valid, rest left over": ((3, 10, 9, 2), (3, 3, 2, 4), (2, 2), "VALID"),
    "shortcut": ((2, 8, 8, 4), (1, 1, 4, 16), (2, 2), "SAME"),
    "stride beyond the kernel": ((1, 10, 10, 3), (2, 2, 3, 4), (3, 3), "VALID"),
}


def _gradients(images, kernel, strides, padding, dilations=(1, 1)):
    def of_one(image):
        with tf.GradientTape() as tape:
            tape.watch(kernel)
            outputs = tf.nn.conv2d(image, kernel, strides, padding, dilations=dilations)
            loss = tf.reduce_sum(tf.sin(outputs))
        return tape.gradient(loss, kernel)

    @tf.function
    def at_once():
        with kernel_gradients_at_once():
            return tf.vectorized_map(of_one, images)

    return at_once().numpy(), np.stack([of_one(image).numpy() for image in images])


@pytest.fixture
def counted(monkeypatch):
    """How often products were taken, while tracing."""
    calls = []
    taken = kernel_gradients._products()
    monkeypatch.setattr(
        kernel_gradients, "_products", lambda: lambda *a, **k: calls.append(k) or taken(*a, **k)
    )
    return calls


@pytest.mark.long
@pytest.mark.parametrize("layer", LAYERS)
def test_gradients_at_once_are_those_of_one_unit(layer, counted):
    """To rounding, for every way to lay a kernel over an image."""
    image, shape, strides, padding = LAYERS[layer]
    random = np.random.default_rng(0)
    images = tf.constant(random.normal(size=(UNITS, *image)).astype(np.float32))
    kernel = tf.constant(random.normal(size=shape).astype(np.float32))
    found, expected = _gradients(images, kernel, strides, padding)
    assert len(counted) == 1
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("change", ["large", "dilated"])
def test_what_pays_no_products_is_left_to_tensorflow(change, counted, monkeypatch):
    """A large kernel, and one with holes."""
    if change == "large":
        monkeypatch.setattr(kernel_gradients, "MOST_PRODUCTS", 1)
    random = np.random.default_rng(0)
    images = tf.constant(random.normal(size=(UNITS, 1, 8, 8, 2)).astype(np.float32))
    kernel = tf.constant(random.normal(size=(3, 3, 2, 4)).astype(np.float32))
    dilations = (2, 2) if change == "dilated" else (1, 1)
    found, expected = _gradients(images, kernel, (1, 1), "SAME", dilations)
    assert not counted
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max())


def test_outside_the_context_tensorflow_is_as_it_was():
    """The table is put back, after an error too."""
    from tensorflow.python.ops.parallel_for import pfor

    def converter():
        return pfor._pfor_converter_registry["Conv2DBackpropFilter"]

    def fails():
        with kernel_gradients_at_once():
            assert converter() is not before
            raise ZeroDivisionError

    before = converter()
    with pytest.raises(ZeroDivisionError):
        fails()
    assert converter() is before
