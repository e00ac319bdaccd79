"""Types of arrays and models that cross packages.

No framework is imported at run time: the names then mean any type, and tests check shapes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Callable

    import jax
    import keras
    import numpy as np
    import tensorflow as tf

    TfTensor: TypeAlias = tf.Tensor
    TfVariable: TypeAlias = tf.Variable
    JaxArray: TypeAlias = jax.Array

    Tensor: TypeAlias = tf.Tensor | jax.Array | np.ndarray
    """Array of a training backend, concrete or traced."""
    AnyTensor = TypeVar("AnyTensor", tf.Tensor, jax.Array, np.ndarray)
    """Array of one backend, the same in a whole signature."""
    Model: TypeAlias = keras.Model
    """Backbone or classifier."""
    Layer: TypeAlias = keras.layers.Layer
    """Layer of a model."""
    LayerMaker: TypeAlias = Callable[..., keras.layers.Layer]
    """Class of a layer, called with the settings of the layer."""
    Node: TypeAlias = keras.KerasTensor
    """Output of a layer while a model is built."""
    Variable: TypeAlias = keras.Variable
    """Variable of a model."""
else:
    AnyTensor = TypeVar("AnyTensor")
    TfTensor = TfVariable = JaxArray = Tensor = Model = Layer = LayerMaker = Node = Variable = Any


Part = TypeVar("Part")
"""Array of a named tuple: of NumPy on the host, or a tensor of a graph, or its specification."""


@runtime_checkable
class JaxDevice(Protocol):
    """Device of JAX."""

    @property
    def platform(self) -> str:
        """Platform, such as `cpu` or `gpu`."""
        ...

    def memory_stats(self) -> dict[str, int] | None:
        """Returns memory figures in bytes; None if the device reports none."""
        ...
