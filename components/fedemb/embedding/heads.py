"""Fresh classification heads: one row per class that a virtual client itself holds.

A head is born and dies inside one virtual client and one round. Its size is the number of distinct
labels of that client, never the number of identities in the world, and it reaches no artifact.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def local_labels(labels: Any) -> tuple[Any, Any]:
    """Renumbers labels inside one client: order of first appearance.

    Args:
      labels: int64 tensor `[examples]`, any values.

    Returns:
      int32 tensor `[examples]` in `0..classes-1`, and the int32 scalar `classes`.
    """
    import tensorflow as tf

    distinct, indices = tf.unique(labels, out_idx=tf.int32)
    return indices, tf.shape(distinct)[0]


def glorot_head(classes: Any, dim: int, seed: Any) -> Any:
    """Glorot-uniform head (the paper's), float32 `[classes, dim]`, from a stateless seed `[2]`."""
    import tensorflow as tf

    limit = tf.sqrt(6.0 / tf.cast(classes + dim, tf.float32))
    return limit * tf.random.stateless_uniform([classes, dim], seed, minval=-1.0, maxval=1.0)


def prototype_head(
    embed: Callable[[Any], Any],
    images: Any,
    labels: Any,
    classes: Any,
    *,
    dim: int,
    batch_size: int,
) -> Any:
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
