"""Gradients that meet at one tensor, added up in one order.

TensorFlow adds them with `AddN`, which begins with the first term whose buffer is free by then.
Which one that is depends on how far other operations have come, so that of three terms or more the
sum differs in its last bits from run to run wherever operations run side by side: kernels that are
standardised, activations that go to three layers. A record must depend on nothing but its unit.

Only TensorFlow knows what adds gradients up; its version is pinned, and a test looks for `AddN` in
what its optimizer leaves of a round.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

_ANY_ORDER = 2
"""Terms up to which the order does not matter."""


@contextmanager
def gradients_summed_in_order() -> Iterator[None]:
    """Inside, `tf.GradientTape` adds gradients up in one order, whatever else runs."""
    from tensorflow.python import pywrap_tfe
    from tensorflow.python.eager import backprop

    usual: Any = backprop._default_vspace
    pywrap_tfe.TFE_Py_RegisterVSpace(usual._replace(aggregate_fn=_summed))
    try:
        yield
    finally:
        pywrap_tfe.TFE_Py_RegisterVSpace(usual)


def _summed(gradients: Sequence[Any]) -> Any:
    import tensorflow as tf
    from tensorflow.python.eager import backprop

    if len(gradients) <= _ANY_ORDER or not all(isinstance(g, tf.Tensor) for g in gradients):
        return backprop._aggregate_grads(gradients)
    total, *rest = gradients
    while rest:
        term = rest.pop(0)
        # Sums that wait for the next term are not made one `AddN` again by the graph's optimizer.
        with tf.control_dependencies(rest[:1]):
            total = total + term
    return total
