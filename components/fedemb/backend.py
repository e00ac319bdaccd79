"""Keras's backend of this process: TensorFlow or JAX, for whatever may run on either."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def keras_ops() -> Any:
    """`keras.ops`; Keras is imported when something is computed, not before."""
    import keras

    return keras.ops


def traced(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles a function of tensors for the backend."""
    import keras

    if keras.backend.backend() == "jax":
        import jax

        return jax.jit(function)
    import tensorflow as tf

    return tf.function(function, autograph=False, reduce_retracing=True)
