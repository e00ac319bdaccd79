"""Keras's backend of this process: TensorFlow or JAX, for whatever may run on either."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from fedemb.errors import ConfigError


def use_backend(name: str) -> None:
    """Settles what Keras runs on in this process, before it is loaded.

    Args:
      name: `tensorflow` or `jax`.

    Raises:
      ConfigError: Keras is loaded already and runs on another one.
    """
    if "keras" in sys.modules:
        import keras

        found = keras.backend.backend()
        if found != name:
            raise ConfigError(
                f"Keras runs on {found} in this process, and training.backend is {name}; train in "
                "a process of its own, which imports Keras after fedemb"
            )
    os.environ["KERAS_BACKEND"] = name


def keras_ops() -> Any:
    """`keras.ops`; Keras is imported when something is computed, not before."""
    import keras

    return keras.ops


def exact_numbers() -> AbstractContextManager[None]:
    """Inside, JAX computes in 64 bits what asks for them; TensorFlow always does."""
    import keras

    if keras.backend.backend() != "jax":
        return nullcontext()
    import jax

    return jax.enable_x64(True)


def traced(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles a function of tensors for the backend."""
    import keras

    if keras.backend.backend() == "jax":
        import jax

        return jax.jit(function)
    import tensorflow as tf

    return tf.function(function, autograph=False, reduce_retracing=True)
