"""L: the fastest plain, non-private training loop we know, on the same tensors as a round.

The same number of forward, backward and SGD steps: one TensorFlow while loop on variables, no
reset, no clip, no noise, no virtual clients. Its intra-op threads are all cores (ours are one per
client), so it lives in a graph session of its own: with `TF_OVERRIDE_GLOBAL_THREADPOOL=1` each
session adds its own threads, and both loops can be timed in turn in one process.
"""

from __future__ import annotations

from typing import Any

import numpy as np


class PlainLoop:
    """Trains backbone and head on all images of a workload.

    Args:
      build: makes a fresh backbone; called inside the graph.
      images: uint8 `[clients, examples, size, size, channels]`.
      labels: int64 `[clients, examples]`, in `0..rows-1`.
      rows: of the head.
      batch_size: examples per step.
      epochs: passes over each client's examples.
      rate: learning rate.
      threads: intra-op threads.
    """

    def __init__(
        self,
        build: Any,
        images: np.ndarray,
        labels: np.ndarray,
        *,
        rows: int,
        batch_size: int,
        epochs: int,
        rate: float,
        threads: int,
    ) -> None:
        import tensorflow as tf

        from fedemb.models.keras_backend import preprocess

        flat, wanted = images.reshape(-1, *images.shape[2:]), labels.reshape(-1)
        per_epoch = len(flat) // batch_size
        steps = per_epoch * epochs
        backbone = build()
        start = [v.numpy() for v in backbone.trainable_variables]
        head_start = np.random.default_rng(0).normal(size=(rows, backbone.output_shape[-1])) * 0.1

        graph = tf.Graph()
        with graph.as_default():

            @tf.function
            def loop(pixels: Any, classes: Any) -> Any:
                def step(index: Any) -> Any:
                    at = (index % per_epoch) * batch_size
                    batch, truth = pixels[at : at + batch_size], classes[at : at + batch_size]
                    values = [v.read_value() for v in weights]
                    with tf.GradientTape(watch_accessed_variables=False) as tape:
                        tape.watch(values)
                        output, _ = backbone.stateless_call(
                            values[:-1], [], preprocess(batch), training=True
                        )
                        logits = tf.matmul(output, values[-1], transpose_b=True)
                        loss = tf.reduce_mean(
                            tf.nn.sparse_softmax_cross_entropy_with_logits(truth, logits)
                        )
                    for variable, gradient in zip(
                        weights, tape.gradient(loss, values), strict=True
                    ):
                        tf.raw_ops.ResourceApplyGradientDescent(
                            var=variable.handle, alpha=rate, delta=gradient
                        )
                    return index + 1

                return tf.while_loop(
                    lambda index: index < steps, step, [tf.constant(0)], parallel_iterations=1
                )[0]

            weights = [tf.compat.v1.Variable(v, use_resource=True) for v in start]
            weights.append(tf.compat.v1.Variable(head_start.astype(np.float32), use_resource=True))
            data = [
                tf.compat.v1.Variable(flat, use_resource=True, trainable=False),
                tf.compat.v1.Variable(wanted, use_resource=True, trainable=False),
            ]
            self._step = loop(data[0].read_value(), data[1].read_value())
            config = tf.compat.v1.ConfigProto(
                intra_op_parallelism_threads=threads, inter_op_parallelism_threads=2
            )
            self._session = tf.compat.v1.Session(graph=graph, config=config)
            self._session.run(tf.compat.v1.global_variables_initializer())

    def __call__(self) -> None:
        """Runs all steps once."""
        self._session.run(self._step)
