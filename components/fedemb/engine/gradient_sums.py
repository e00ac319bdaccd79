"""Sums several gradients of one tensor in a fixed order.

TensorFlow sums them with `AddN`, which starts with the first term whose buffer is free. This order
depends on the progress of parallel operations. So a sum of three or more terms differs in its last
bits between runs, for example for standardised kernels or activations used by three layers. A
record must depend only on its unit.

The summation is internal to TensorFlow. So its version is pinned, and a test checks the optimized
graph of a round for `AddN`.
"""

# TensorFlow, Keras, JAX and SciPy are not fully typed; the project's own signatures are checked.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

from fedemb.models.arrays import TfTensor

if TYPE_CHECKING:
    import tensorflow as tf

_ANY_ORDER = 2
"""Maximum number of terms whose order does not matter."""


@contextmanager
def gradients_summed_in_order() -> Generator[None]:
    """While entered, `tf.GradientTape` sums gradients in a fixed order."""
    from tensorflow.python import pywrap_tfe
    from tensorflow.python.eager import backprop

    usual = backprop._default_vspace
    pywrap_tfe.TFE_Py_RegisterVSpace(usual._replace(aggregate_fn=_summed))
    try:
        yield
    finally:
        pywrap_tfe.TFE_Py_RegisterVSpace(usual)


def _summed(gradients: Sequence[TfTensor | tf.IndexedSlices]) -> TfTensor:
    import tensorflow as tf
    from tensorflow.python.eager import backprop

    if len(gradients) <= _ANY_ORDER or not all(isinstance(g, tf.Tensor) for g in gradients):
        return cast("TfTensor", backprop._aggregate_grads(gradients))
    total, *rest = cast("Sequence[TfTensor]", gradients)
    while rest:
        term = rest.pop(0)
        # The dependency prevents the graph optimizer from fusing the sums into one `AddN`.
        with tf.control_dependencies(rest[:1]):
            total = total + term
    return total
