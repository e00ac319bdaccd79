"""L: the fastest plain, non-private training loop we know, on the same tensors as a round.

The same number of forward, backward and SGD steps: one TensorFlow while loop on variables, no
reset, no clip, no noise, no virtual clients. Its intra-op threads are all cores; ours are one per
client.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np


def plain_loop(
    backbone: Any,
    images: np.ndarray,
    labels: np.ndarray,
    *,
    rows: int,
    batch_size: int,
    epochs: int,
    rate: float,
) -> Callable[[], object]:
    """Returns what trains backbone and head on all images of a workload once.

    Args:
      backbone: `keras.Model`.
      images: uint8 `[clients, examples, size, size, channels]`.
      labels: int64 `[clients, examples]`, in `0..rows-1`.
      rows: of the head.
      batch_size: examples per step.
      epochs: passes over each client's examples.
      rate: learning rate.
    """
    import tensorflow as tf

    from fedemb.models.keras_backend import preprocess

    flat, wanted = tf.constant(images.reshape(-1, *images.shape[2:])), tf.constant(labels.ravel())
    per_epoch = len(flat) // batch_size
    head = np.random.default_rng(0).normal(size=(rows, backbone.output_shape[-1])) * 0.1
    start = [v.numpy() for v in backbone.trainable_variables]
    weights = [tf.Variable(v) for v in (*start, head.astype(np.float32))]

    def step(index: Any) -> Any:
        at = (index % per_epoch) * batch_size
        batch, truth = flat[at : at + batch_size], wanted[at : at + batch_size]
        values = [v.read_value() for v in weights]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(values)
            output, _ = backbone.stateless_call(values[:-1], [], preprocess(batch), training=True)
            logits = tf.matmul(output, values[-1], transpose_b=True)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(truth, logits)
            loss = tf.reduce_mean(losses)
        for variable, gradient in zip(weights, tape.gradient(loss, values), strict=True):
            tf.raw_ops.ResourceApplyGradientDescent(var=variable.handle, alpha=rate, delta=gradient)
        return index + 1

    @tf.function
    def loop() -> Any:
        steps = per_epoch * epochs
        return tf.while_loop(lambda index: index < steps, step, [0], parallel_iterations=1)[0]

    return loop
