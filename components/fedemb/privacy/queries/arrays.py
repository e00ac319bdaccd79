"""Types of arrays that a mechanism exchanges with a training engine."""

from __future__ import annotations

from typing import Protocol, TypeAlias, runtime_checkable


@runtime_checkable
class Array(Protocol):
    """Array of NumPy, TensorFlow or JAX, concrete or traced."""

    @property
    def shape(self) -> object:
        """Shape, in the type of its library."""
        ...

    @property
    def dtype(self) -> object:
        """Element type, in the type of its library."""
        ...


Parameters: TypeAlias = Array
"""Parameter of the records of a round: the clip, float64 scalar."""
