"""Training on one pooled data set: public pretraining, and the baseline without privacy.

Uses the losses, augmentation and optimizer kernels of local training, in one loop over shuffled
batches. The learning rate increases for a tenth of the steps, then decays along a half cosine.
"""

# TensorFlow, Keras, JAX and SciPy are not fully typed; the project's own signatures are checked.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false
# pyright: reportUntypedFunctionDecorator=false

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
from jaxtyping import Int, UInt8

from fedemb.config import PretrainingConfig, RunConfig, TrainingConfig
from fedemb.models.backbone_files import load_backbone
from fedemb.models.backbones import with_bfloat16
from fedemb.models.keras_backend import Model, TfTensor, preprocess
from fedemb.models.losses import build_loss
from fedemb.models.public_features import without_public_features
from fedemb.training.clients import augment, glorot_head, stateless_draws
from fedemb.training.tensorflow_clients import gradients_summed_in_order

if TYPE_CHECKING:
    from fedemb.data.client_data import VerifiedFolder

_LOG = logging.getLogger(__name__)

Embed = Callable[[TfTensor], TfTensor]
"""Embeddings, or logits, of uint8 images."""
LossOf = Callable[[Embed, Sequence[TfTensor], TfTensor, TfTensor, TfTensor], TfTensor]
"""`(embed, extra variables, uint8 images, labels, int64 seed [2]) -> scalar loss`."""

MOMENTUM = 0.9
WARM_UP = 0.1
"""Share of the steps with increasing learning rate; cosine losses need a warm-up."""


def minimize(
    backbone: Model,
    extra: Sequence[np.ndarray],
    loss_of: LossOf,
    images: UInt8[np.ndarray, "images size size channels"],
    labels: Int[np.ndarray, " images"],
    *,
    schedule: PretrainingConfig,
    seed: int,
) -> float:
    """Trains a backbone in place by SGD with momentum.

    Args:
      backbone: `keras.Model`; all its trainable variables change.
      extra: initial values of additional trained variables (heads), dropped afterwards.
      loss_of: loss of a batch.
      images: uint8 `[images, size, size, channels]`.
      labels: int32 `[images]`.
      schedule: length and rates.
      seed: seed of shuffles and of the draws of `loss_of`.

    Returns:
      Mean loss of the last epoch.
    """
    import tensorflow as tf

    count, batch = len(labels), min(schedule.batch_size, len(labels))
    steps = count // batch
    pooled = _PooledTraining(backbone, extra, loss_of, schedule)
    pixels, classes = tf.constant(images), tf.constant(labels, tf.int32)

    @tf.function(autograph=False)
    def epoch(order: TfTensor, first: TfTensor, words: TfTensor) -> TfTensor:
        def step(index: TfTensor, total: TfTensor) -> tuple[TfTensor, TfTensor]:
            chosen = tf.slice(order, [index * batch], [batch])
            at = (tf.cast(first + index, tf.float32) + 0.5) / float(steps * schedule.epochs)
            seeds = words + tf.cast(tf.stack([0, index]), tf.int64)
            value = pooled.step(tf.gather(pixels, chosen), tf.gather(classes, chosen), at, seeds)
            return index + 1, total + value

        _, total = tf.while_loop(
            lambda index, _: index < steps,
            step,
            (tf.constant(0), tf.constant(0.0)),
            parallel_iterations=1,
        )
        return total / tf.cast(steps, tf.float32)

    loss = math.nan
    for number in range(schedule.epochs):
        random = np.random.default_rng(np.random.SeedSequence([seed, number]))
        order = tf.constant(random.permutation(count)[: steps * batch], tf.int32)
        words = tf.constant(random.integers(0, 2**31, 2), tf.int64)
        loss = float(epoch(order, tf.constant(number * steps), words))
        _LOG.info("epoch %d/%d loss %.4f", number + 1, schedule.epochs, loss)
    pooled.finish()
    return loss


class _PooledTraining:
    """Variables and step of a pooled training."""

    def __init__(
        self,
        backbone: Model,
        extra: Sequence[np.ndarray],
        loss_of: LossOf,
        schedule: PretrainingConfig,
    ) -> None:
        import tensorflow as tf

        self._backbone, self._loss_of, self._schedule = backbone, loss_of, schedule
        self._trained = with_bfloat16(backbone) if schedule.mixed_precision else backbone
        values = [v.value for v in backbone.trainable_variables]
        self._weights = [tf.Variable(value, trainable=False) for value in values]
        self._heads = [tf.Variable(tf.constant(value), trainable=False) for value in extra]
        self._variables = [*self._weights, *self._heads]
        self._slots = [tf.Variable(tf.zeros_like(v), trainable=False) for v in self._variables]

    def step(self, images: TfTensor, labels: TfTensor, at: TfTensor, seeds: TfTensor) -> TfTensor:
        """Takes one step; returns the loss before it.

        Args:
          images: uint8 `[batch, size, size, channels]`.
          labels: int32 `[batch]`.
          at: float32 scalar, completed share of the training.
          seeds: int64 `[2]`.
        """
        import tensorflow as tf

        current = [v.read_value() for v in self._weights]
        extras = [v.read_value() for v in self._heads]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch([*current, *extras])
            value = self._loss_of(
                lambda batch: _embed(self._trained, current, batch), extras, images, labels, seeds
            )
        with gradients_summed_in_order():
            gradients = tape.gradient(
                value, [*current, *extras], unconnected_gradients=tf.UnconnectedGradients.ZERO
            )
        self._apply(cast("list[TfTensor]", gradients), at)
        return value

    def _apply(self, gradients: Sequence[TfTensor], at: TfTensor) -> None:
        import tensorflow as tf

        schedule = self._schedule
        cosine = 0.5 * schedule.learning_rate * (1.0 + tf.cos(math.pi * at))
        rate = cosine * tf.minimum(1.0, at / WARM_UP)
        for variable, slot, gradient in zip(self._variables, self._slots, gradients, strict=True):
            tf.raw_ops.ResourceApplyMomentum(
                var=variable.handle, accum=slot.handle, lr=rate, grad=gradient, momentum=MOMENTUM
            )

    def finish(self) -> None:
        """Writes the trained weights into the backbone."""
        for variable, value in zip(self._backbone.trainable_variables, self._weights, strict=True):
            variable.assign(value)


def _embed(backbone: Model, weights: Sequence[TfTensor], images: TfTensor) -> TfTensor:
    import tensorflow as tf

    state = [v.value for v in backbone.non_trainable_variables]
    return tf.cast(
        backbone.stateless_call(weights, state, preprocess(images), training=True)[0], tf.float32
    )


def _glorot(rows: int, columns: int, seed: int) -> np.ndarray:
    seeds = np.random.SeedSequence([seed, rows, columns])
    return glorot_head(rows, columns, np.random.default_rng(seeds))


def pretrain(
    backbone: Model,
    images: UInt8[np.ndarray, "images size size channels"],
    labels: Int[np.ndarray, " images"],
    config: PretrainingConfig,
    *,
    seed: int,
) -> float:
    """Trains a backbone in place, with a head of one row per class that is dropped.

    Args:
      backbone: from `build_backbone`.
      images: uint8 `[images, size, size, channels]`, public.
      labels: int64 `[images]`; of any values.
      config: loss, augmentation and schedule.
      seed: seed of shuffles, heads and augmentation.

    Returns:
      Mean loss of the last epoch.
    """
    distinct, rows = np.unique(labels, return_inverse=True)
    build, augmentation = build_loss(config.loss), config.augmentation

    def loss_of(
        embed: Embed, extra: Sequence[TfTensor], batch: TfTensor, wanted: TfTensor, words: TfTensor
    ) -> TfTensor:
        if augmentation is not None:
            batch = augment(batch, augmentation, stateless_draws(words))
        return build(embed(batch), extra[0], wanted)

    head = _glorot(len(distinct), int(backbone.output_shape[-1]), seed)
    return minimize(backbone, [head], loss_of, images, rows, schedule=config, seed=seed)


def train_centralized(
    backbone: Model,
    images: UInt8[np.ndarray, "images size size channels"],
    labels: Int[np.ndarray, " images"],
    training: TrainingConfig,
    *,
    epochs: int = 15,
    learning_rate: float = 0.05,
) -> Model:
    """Trains the baseline without privacy, with loss and augmentation of the private run.

    Args:
      backbone: initial backbone; trained in place.
      images: uint8 `[images, size, size, channels]` of all training users.
      labels: int64 `[images]`, any values.
      training: training configuration of the run; provides loss, augmentation and seed.
      epochs: passes over the images.
      learning_rate: maximum of the schedule.

    Returns:
      The backbone.
    """
    local, seed = training.local, training.seed
    schedule = PretrainingConfig(
        epochs=epochs, learning_rate=learning_rate, loss=local.loss, augmentation=local.augmentation
    )
    if training.algorithm == "dp_sgd":  # a classifier has its head already
        import tensorflow as tf

        def loss_of(embed: Embed, _: object, batch: TfTensor, wanted: TfTensor, __: object):
            entropy = tf.nn.sparse_softmax_cross_entropy_with_logits
            return tf.reduce_mean(entropy(wanted, embed(batch)))

        minimize(backbone, [], loss_of, images, labels, schedule=schedule, seed=seed)
    else:
        pretrain(backbone, images, labels, schedule, seed=seed)
    return backbone


def train_without_privacy(config: RunConfig, pretrained: Path, users: VerifiedFolder) -> Model:
    """Trains the non-private baseline of a simulation from the same public backbone."""
    from fedemb.data.client_data import UserStore, load_examples

    backbone = load_backbone(pretrained / "backbone.keras", config.model)
    store = UserStore(users)
    images, labels = load_examples(
        store,
        np.arange(len(store)),
        max_examples=int(store.image_counts.sum()),
        image_size=config.model.image_size,
        channels=config.model.channels,
    )
    epochs = config.evaluation.centralized_epochs
    trained = without_public_features(backbone)
    train_centralized(trained, images, labels, config.training, epochs=epochs)
    return backbone
