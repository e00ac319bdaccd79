"""Initial heads from class means of a virtual client's embeddings."""

# TensorFlow, Keras, JAX and SciPy are not fully typed; the project's own signatures are checked.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

from __future__ import annotations

from collections.abc import Callable

from jaxtyping import Float32, Int32, UInt8

from fedemb.models.arrays import TfTensor


def prototype_head(
    embed: Callable[[TfTensor], TfTensor],
    images: UInt8[TfTensor, "examples size size channels"],
    labels: Int32[TfTensor, " examples"],
    classes: Int32[TfTensor, ""],
    *,
    dim: int,
    batch_size: int,
) -> Float32[TfTensor, "classes {dim}"]:
    """Returns a head of normalized class means of the client's embeddings.

    The head is a function of the broadcast backbone and the client's examples, so it does not
    increase the client's sensitivity.

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

    def add(start: TfTensor, total: TfTensor) -> tuple[TfTensor, TfTensor]:
        stop = tf.minimum(start + batch_size, count)
        unit = tf.math.l2_normalize(embed(images[start:stop]), axis=1)
        # A product, not a scatter, because the order of its additions is fixed.
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
