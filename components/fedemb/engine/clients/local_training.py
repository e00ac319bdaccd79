"""Local training of one virtual client, as a graph of TensorFlow.

Implements DP-FedEmb (arXiv 2211.10844; docs/explanation/method.md#algorithm): new head, local
steps, difference of the weights. The state of a client is in the variables of its worker and is
overwritten by the next client; only the update is returned. Fused in-place optimizer kernels make a
local step as cheap as in a plain loop.

All random draws are made in `client_draws.py`. Batch shapes depend only on the number of examples
of the client: the last batch of an epoch is short, never padded.
"""

# TensorFlow, Keras, JAX and SciPy are not fully typed; the project's own signatures are checked.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from fedemb.config import LocalTrainingConfig
from fedemb.engine.clients.augmentation import DRAWS, augment
from fedemb.engine.clients.client_draws import LocalData
from fedemb.engine.clients.heads import prototype_head
from fedemb.engine.clients.objective import PROTOTYPE_BATCH, Objective
from fedemb.models.arrays import TfTensor, TfVariable
from fedemb.models.losses import build_loss

if TYPE_CHECKING:
    import tensorflow as tf

_State = tuple["tf.Tensor", "tf.Tensor"]
"""Index of the next step, and losses of the first and last epoch, float32 `[2]`."""


class Worker:
    """Variables in which virtual clients train sequentially; one worker per core or device.

    Args:
      objective: trained model and its local configuration.
      index: number of the worker, used in names.
    """

    def __init__(self, objective: Objective, index: int) -> None:
        import tensorflow as tf

        def make(shape: Sequence[int | None], kind: str) -> TfVariable:
            known = [n or 0 for n in shape]
            return tf.Variable(
                tf.zeros(known), shape=shape, trainable=False, name=f"worker{index}_{kind}"
            )

        config = objective.config
        per_weight = int(config.client_momentum > 0)
        body = [tuple(int(n) for n in v.shape) for v in objective.variables]
        head = (objective.shared_head_rows or None, objective.dim)
        self.weights = [make(shape, "weight") for shape in body]
        self.head = make(head, "head")
        self.slots = [[make(shape, "slot") for _ in range(per_weight)] for shape in [*body, head]]

    def start(self, values: Sequence[TfTensor]) -> None:
        """Overwrites the state of the last client; `values` are weights, then the head."""
        import tensorflow as tf

        for variable, value, slots in zip(
            [*self.weights, self.head], values, self.slots, strict=True
        ):
            variable.assign(value)
            for slot in slots:
                slot.assign(tf.zeros_like(value))


def first_head(
    objective: Objective, broadcast: Sequence[TfTensor], examples: LocalData[TfTensor]
) -> TfTensor:
    """Returns the initial head of a client, one row per label."""
    if objective.config.head_init == "glorot":
        return examples.head
    return _prototypes(objective, broadcast, examples)


def _prototypes(
    objective: Objective, weights: Sequence[TfTensor], examples: LocalData[TfTensor]
) -> TfTensor:
    """Returns normalised class means of a client's own embeddings, one row per label."""
    import tensorflow as tf

    config = objective.config
    return prototype_head(
        lambda batch: objective.embeddings(weights, batch),
        examples.images,
        examples.rows,
        tf.shape(examples.head)[0],
        dim=objective.dim,
        batch_size=max(config.batch_size, PROTOTYPE_BATCH),
    )


def apply_gradient(
    config: LocalTrainingConfig,
    trained: tuple[TfVariable, Sequence[TfVariable]],
    *,
    gradient: TfTensor,
    rate: float,
) -> None:
    """Applies one step in place to a variable and its slots."""
    import tensorflow as tf

    variable, slots = trained
    if slots:
        tf.raw_ops.ResourceApplyMomentum(
            var=variable.handle,
            accum=slots[0].handle,
            lr=rate,
            grad=gradient,
            momentum=config.client_momentum,
        )
    else:
        tf.raw_ops.ResourceApplyGradientDescent(var=variable.handle, alpha=rate, delta=gradient)


def _complete(gradients: Sequence[TfTensor]) -> list[TfTensor]:
    """Returns the gradients after all are computed, so that no weight is copied."""
    import tensorflow as tf

    with tf.control_dependencies(gradients):
        return [tf.identity(gradient) for gradient in gradients]


class _LocalSteps:
    """The local steps of one virtual client, in the variables of a worker."""

    def __init__(self, objective: Objective, worker: Worker, examples: LocalData[TfTensor]) -> None:
        import tensorflow as tf

        self._objective, self._worker, self._examples = objective, worker, examples
        self._config, self._loss = objective.config, build_loss(objective.config.loss)
        self._count = tf.shape(examples.rows)[0]
        self._per_epoch = -(-self._count // self._config.batch_size)

    def run(self) -> tf.Tensor:
        """Takes all steps; returns the mean loss of the first and last epoch, float32 `[2]`."""
        import tensorflow as tf

        total, state = self._per_epoch * self._config.epochs, (tf.constant(0), tf.zeros([2]))
        return tf.while_loop(
            lambda index, _: index < total, self._step, state, parallel_iterations=1
        )[1]

    def _step(self, index: tf.Tensor, losses: tf.Tensor) -> _State:
        """Takes one step; returns the next index and the losses with the step's share added."""
        import tensorflow as tf

        config, worker = self._config, self._worker
        epoch = index // self._per_epoch
        batch, rows = self._batch(index, epoch)
        weights = [v.read_value() for v in worker.weights]
        head = worker.head.read_value()
        if config.refresh_prototypes and not self._objective.shared_head_rows:
            head = tf.cond(
                tf.equal(tf.math.floormod(index, self._per_epoch), 0),
                lambda: _prototypes(self._objective, weights, self._examples),
                lambda: head,
            )
            worker.head.assign(head)
        learners = [*weights, head]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(learners)
            embeddings = self._objective.embeddings(weights, batch)
            loss = self._loss(embeddings, head, rows)
        gradients = tape.gradient(
            loss, learners, unconnected_gradients=tf.UnconnectedGradients.ZERO
        )
        gradients = _complete(cast("list[TfTensor]", gradients))
        trained = list(zip([*worker.weights, worker.head], worker.slots, strict=True))
        for pair, gradient in zip(trained, gradients, strict=True):
            rate = config.client_learning_rate
            if pair[0] is worker.head:
                rate *= config.head_learning_rate_scale
            apply_gradient(config, pair, gradient=gradient, rate=rate)
        share = loss / tf.cast(self._per_epoch, tf.float32)
        first = tf.where(epoch == 0, share, 0.0)
        last = tf.where(epoch == config.epochs - 1, share, 0.0)
        return index + 1, losses + tf.stack([first, last])

    def _batch(self, index: tf.Tensor, epoch: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the augmented images of a step and their rows of the head."""
        import tensorflow as tf

        config, examples, count = self._config, self._examples, self._count
        offset = (index - epoch * self._per_epoch) * config.batch_size
        size = tf.minimum(config.batch_size, count - offset)
        visits = slice(epoch * count + offset, epoch * count + offset + size)
        chosen = examples.order[visits]
        batch, rows = tf.gather(examples.images, chosen), tf.gather(examples.rows, chosen)
        if config.augmentation is None:
            return batch, rows
        draws = tf.transpose(tf.reshape(examples.draws[visits], [-1, DRAWS]))
        return augment(batch, config.augmentation, lambda _: draws), rows


def train_client(
    objective: Objective,
    worker: Worker,
    broadcast: Sequence[tf.Tensor],
    examples: LocalData[TfTensor],
) -> tuple[list[tf.Tensor], tf.Tensor]:
    """Trains one virtual client and returns its update.

    Args:
      objective: backbone, trained variables, local configuration.
      worker: variables to train in.
      broadcast: float32 tensors of `objective.shapes`, initial weights of all clients.
      examples: examples of the virtual client.

    Returns:
      The update, trained minus broadcast, float32 tensors of `objective.shapes`; and float32 `[2]`:
      mean loss of the first and of the last epoch. The update is neither clipped nor checked for
      finite values: the mechanism does both.
    """
    starts = list(broadcast)
    head = starts.pop() if objective.shared_head_rows else first_head(objective, starts, examples)
    worker.start([*starts, head])
    losses = _LocalSteps(objective, worker, examples).run()
    ends = [v.read_value() for v in worker.weights]
    if objective.shared_head_rows:
        starts, ends = [*starts, head], [*ends, worker.head.read_value()]
    return [end - start for end, start in zip(ends, starts, strict=True)], losses
