"""Heads that start at the class means of a virtual client's own embeddings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxtyping import Float32, Int32, UInt8


def prototype_head(
    embed: Callable[[Any], Any],
    images: UInt8[Any, "examples size size channels"],
    labels: Int32[Any, " examples"],
    classes: Int32[Any, ""],
    *,
    dim: int,
    batch_size: int,
) -> Float32[Any, "classes {dim}"]:
    """Head of normalised class means of the client's own embeddings.

    Deterministic in the broadcast backbone and the client's examples, so it adds nothing to the
    client's sensitivity.

    Args:
      embed: uint8 images `[batch, ...]` to embeddings `[batch, dim]` under the broadcast backbone.
      images: uint8 `[examples, height, width, channels]`.
      labels: int32 `[examples]` in `0..classes-1`.
      classes: int32 scalar.
      dim: length of an embedding.
      batch_size: images embedded at once; bounds memory.

    Returns:
      float32 `[classes, dim]` with rows of unit length.
    """
    import tensorflow as tf

    count = tf.shape(labels)[0]

    def add(start: Any, total: Any) -> tuple[Any, Any]:
        stop = tf.minimum(start + batch_size, count)
        unit = tf.math.l2_normalize(embed(images[start:stop]), axis=1)
        # A product instead of a scatter: the order of the additions is fixed.
        member = tf.one_hot(labels[start:stop], classes, axis=0, dtype=tf.float32)
        return stop, total + tf.matmul(member, unit)

    _, total = tf.while_loop(
        lambda start, _: start < count,
        add,
        (tf.constant(0), tf.zeros([classes, dim])),
        shape_invariants=(tf.TensorShape([]), tf.TensorShape([None, dim])),
        parallel_iterations=1,
    )
    return tf.math.l2_normalize(total, axis=1)
