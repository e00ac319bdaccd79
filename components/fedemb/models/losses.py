"""Losses of local and public training, on embeddings and a head of one row per class.

All losses take un-normalised embeddings and labels in `0..classes-1` and return the mean over
examples. A batch and a head may be padded to a fixed shape: rows that are not `Real` add nothing to
value and gradient.
Sources: softmax and normalised softmax, DP-FedEmb (arXiv 2211.10844, `losses.py`); CosFace, arXiv
1801.09414.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Generic, Protocol

from jaxtyping import Float32, Int32

from fedemb.config import LossConfig
from fedemb.models.keras_backend import AnyTensor, Part, keras_ops

NEVER = -1e30
"""Logit of a class that no example has: its softmax and its gradient are 0."""


@dataclass(frozen=True)
class Real(Generic[Part]):
    """Masks of the real rows of a padded batch and of a padded head."""

    examples: Part
    """bool `[examples]`, at least one True."""
    classes: Part
    """bool `[classes]`."""


class Loss(Protocol):
    """Mean loss of a batch."""

    def __call__(
        self,
        embeddings: AnyTensor,
        head: AnyTensor,
        labels: AnyTensor,
        real: Real[AnyTensor] | None = None,
        /,
    ) -> AnyTensor:
        """Returns a scalar.

        Args:
          embeddings: `[examples, dim]`.
          head: `[classes, dim]`.
          labels: `[examples]`.
          real: masks of a padded batch.
        """
        ...


def cross_entropy(
    logits: AnyTensor, labels: AnyTensor, real: Real[AnyTensor] | None = None
) -> AnyTensor:
    """Returns the mean cross-entropy of logits `[examples, classes]`."""
    ops = keras_ops()
    if real is not None:
        logits = ops.where(real.classes[None, :], logits, NEVER)
    losses = ops.sparse_categorical_crossentropy(labels, logits, from_logits=True)
    if real is None:
        return ops.mean(losses)
    count = ops.sum(ops.cast(real.examples, losses.dtype))
    return ops.sum(ops.where(real.examples, losses, 0.0)) / count


def unit_rows(rows: AnyTensor) -> AnyTensor:
    """Scales rows `[rows, dim]` to length 1; zero rows stay zero."""
    ops = keras_ops()
    squares = ops.sum(ops.square(rows), axis=1, keepdims=True)
    return ops.multiply(rows, ops.rsqrt(ops.maximum(squares, 1e-12)))


def _products(left: AnyTensor, right: AnyTensor) -> AnyTensor:
    """Returns the inner product of every row with every row."""
    ops = keras_ops()
    return ops.matmul(left, ops.transpose(right))


def softmax_loss(
    embeddings: Float32[AnyTensor, "examples dim"],
    head: Float32[AnyTensor, "classes dim"],
    labels: Int32[AnyTensor, " examples"],
    real: Real[AnyTensor] | None = None,
) -> Float32[AnyTensor, ""]:
    """Returns the cross-entropy of `embeddings @ head.T`, without normalisation."""
    return cross_entropy(_products(embeddings, head), labels, real)


def cosines(
    embeddings: Float32[AnyTensor, "examples dim"], head: Float32[AnyTensor, "classes dim"]
) -> Float32[AnyTensor, "examples classes"]:
    """Returns the cosine of every embedding with every row of the head."""
    rows, unit = unit_rows(head), unit_rows(embeddings)
    return _products(unit, rows)


def normalized_softmax_loss(
    embeddings: Float32[AnyTensor, "examples dim"],
    head: Float32[AnyTensor, "classes dim"],
    labels: Int32[AnyTensor, " examples"],
    real: Real[AnyTensor] | None = None,
    *,
    scale: float,
) -> Float32[AnyTensor, ""]:
    """Returns the cross-entropy of `scale` x cosine. The paper's initial scale, 1, is too small."""
    return cross_entropy(scale * cosines(embeddings, head), labels, real)


def cosface_loss(
    embeddings: Float32[AnyTensor, "examples dim"],
    head: Float32[AnyTensor, "classes dim"],
    labels: Int32[AnyTensor, " examples"],
    real: Real[AnyTensor] | None = None,
    *,
    scale: float,
    margin: float,
) -> Float32[AnyTensor, ""]:
    """Returns the cross-entropy of `scale` x cosine, minus `margin` at the true class."""
    ops = keras_ops()
    values = cosines(embeddings, head)
    true = ops.cast(labels[:, None] == ops.arange(ops.shape(head)[0], dtype="int32"), values.dtype)
    return cross_entropy(scale * (values - margin * true), labels, real)


def build_loss(config: LossConfig) -> Loss:
    """Returns the loss of a configuration."""
    scale, margin = config.scale, config.margin
    losses: dict[str, Loss] = {
        "softmax": softmax_loss,
        "normalized_softmax": partial(normalized_softmax_loss, scale=scale),
        "cosface": partial(cosface_loss, scale=scale, margin=margin),
    }
    return losses[config.kind]
