"""Keras's backend of this process: TensorFlow or JAX, for whatever may run on either."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def traced(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles a function of tensors for the backend."""
    import keras

    if keras.backend.backend() == "jax":
        import jax

        return jax.jit(function)
    import tensorflow as tf

    return tf.function(function, reduce_retracing=True)
