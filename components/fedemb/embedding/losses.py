"""Losses of local and public training, on embeddings and a head of one row per class.

All take un-normalised embeddings and labels in `0..classes-1` and return the mean over examples.
Sources: softmax and normalised softmax, DP-FedEmb (arXiv 2211.10844, `losses.py`); ArcFace,
arXiv 1801.07698; CosFace, arXiv 1801.09414; batch-hard triplet, arXiv 1703.07737.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from jaxtyping import Float32, Int32

from fedemb.config import LossConfig

Loss = Callable[[Any, Any, Any], Any]
"""`(embeddings [examples, dim], head [classes, dim], labels [examples]) -> scalar`."""


def _mean_cross_entropy(logits: Any, labels: Any) -> Any:
    import tensorflow as tf

    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
    return tf.reduce_mean(losses)


def softmax_loss(
    embeddings: Float32[Any, "examples dim"],
    head: Float32[Any, "classes dim"],
    labels: Int32[Any, " examples"],
) -> Float32[Any, ""]:
    """Cross-entropy of `embeddings @ head.T`, nothing normalised."""
    import tensorflow as tf

    return _mean_cross_entropy(tf.matmul(embeddings, head, transpose_b=True), labels)


def cosines(
    embeddings: Float32[Any, "examples dim"], head: Float32[Any, "classes dim"]
) -> Float32[Any, "examples classes"]:
    """Cosine of every embedding with every row of the head."""
    import tensorflow as tf

    rows, unit = tf.math.l2_normalize(head, axis=1), tf.math.l2_normalize(embeddings, axis=1)
    return tf.matmul(unit, rows, transpose_b=True)


def normalized_softmax_loss(
    embeddings: Float32[Any, "examples dim"],
    head: Float32[Any, "classes dim"],
    labels: Int32[Any, " examples"],
    *,
    scale: float,
) -> Float32[Any, ""]:
    """Cross-entropy of `scale` x cosine. The paper's code starts the scale at 1, far too small."""
    return _mean_cross_entropy(scale * cosines(embeddings, head), labels)


def cosface_loss(
    embeddings: Float32[Any, "examples dim"],
    head: Float32[Any, "classes dim"],
    labels: Int32[Any, " examples"],
    *,
    scale: float,
    margin: float,
) -> Float32[Any, ""]:
    """Cross-entropy of `scale` x cosine, less `margin` at the true class."""
    import tensorflow as tf

    values = cosines(embeddings, head)
    true = tf.one_hot(labels, tf.shape(head)[0], dtype=values.dtype)
    return _mean_cross_entropy(scale * (values - margin * true), labels)


def arcface_loss(
    embeddings: Float32[Any, "examples dim"],
    head: Float32[Any, "classes dim"],
    labels: Int32[Any, " examples"],
    *,
    scale: float,
    margin: float,
) -> Float32[Any, ""]:
    """Cross-entropy of `scale` x cosine, with `margin` radians added to the true class's angle.

    Where the angle would pass pi, the cosine is lowered by `margin * sin(margin)` instead, as in
    the authors' code: the loss stays monotone.
    """
    import tensorflow as tf

    values = cosines(embeddings, head)
    # Bounded away from +-1, where the derivative of the sine is infinite.
    inside = tf.clip_by_value(values, -1.0 + 1e-6, 1.0 - 1e-6)
    turned = inside * math.cos(margin) - tf.sqrt(1.0 - inside * inside) * math.sin(margin)
    lowered = inside - margin * math.sin(margin)
    target = tf.where(inside > math.cos(math.pi - margin), turned, lowered)
    true = tf.one_hot(labels, tf.shape(head)[0], on_value=True, off_value=False, dtype=tf.bool)
    return _mean_cross_entropy(scale * tf.where(true, target, values), labels)


def triplet_loss(
    embeddings: Float32[Any, "examples dim"],
    head: Float32[Any, "classes dim"],
    labels: Int32[Any, " examples"],
    *,
    margin: float,
) -> Float32[Any, ""]:
    """Batch-hard triplet loss on unit embeddings; the head is not used.

    Each example that has both a positive and a negative in the batch is an anchor; the mean is
    over anchors, and 0 where there is none.
    """
    import tensorflow as tf

    del head
    unit = tf.math.l2_normalize(embeddings, axis=1)
    squared = 2.0 - 2.0 * tf.matmul(unit, unit, transpose_b=True)
    distances = tf.sqrt(tf.maximum(squared, 1e-12))
    same = labels[:, None] == labels[None, :]
    positive = tf.logical_and(same, tf.logical_not(tf.eye(tf.shape(labels)[0], dtype=tf.bool)))
    anchors = tf.logical_and(tf.reduce_any(positive, 1), tf.reduce_any(tf.logical_not(same), 1))
    far = tf.reduce_max(tf.where(positive, distances, 0.0), axis=1)
    near = tf.reduce_min(tf.where(same, 4.0, distances), axis=1)
    hinge = tf.where(anchors, tf.nn.relu(far - near + margin), 0.0)
    count = tf.reduce_sum(tf.cast(anchors, tf.float32))
    return tf.reduce_sum(hinge) / tf.maximum(count, 1.0)


def contrastive_loss(
    first: Float32[Any, "examples dim"],
    second: Float32[Any, "examples dim"],
    *,
    temperature: float,
) -> Float32[Any, ""]:
    """SimCLR's loss (arXiv 2002.05709): two views of an image find each other in the batch."""
    import tensorflow as tf

    views = tf.math.l2_normalize(tf.concat([first, second], axis=0), axis=1)
    count = tf.shape(first)[0]
    logits = tf.matmul(views, views, transpose_b=True) / temperature
    logits -= 1e9 * tf.eye(2 * count)
    partner = tf.concat([tf.range(count, 2 * count), tf.range(count)], axis=0)
    return _mean_cross_entropy(logits, partner)


def penalized(loss: Any, variables: Sequence[Any], weights: Sequence[Any]) -> Any:
    """Adds the weight decay that layers ask for: `variables[i].regularizer` of `weights[i]`."""
    import tensorflow as tf

    terms = [
        variable.regularizer(weight)
        for variable, weight in zip(variables, weights, strict=True)
        if variable.regularizer is not None
    ]
    return tf.add_n([loss, *terms]) if terms else loss


def build_loss(config: LossConfig) -> Loss:
    """The loss a configuration names."""
    scale, margin = config.scale, config.margin
    losses: dict[str, Loss] = {
        "softmax": softmax_loss,
        "normalized_softmax": partial(normalized_softmax_loss, scale=scale),
        "cosface": partial(cosface_loss, scale=scale, margin=margin),
        "arcface": partial(arcface_loss, scale=scale, margin=margin),
        "triplet": partial(triplet_loss, margin=margin),
    }
    return losses[config.kind]
