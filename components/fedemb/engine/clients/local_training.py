"""Local training of one virtual client, as a graph of TensorFlow.

Fresh head, local steps, difference of the weights: algorithm of DP-FedEmb (arXiv 2211.10844;
docs/explanation/method.md#algorithm). The state of a client lives in the variables of the worker
that trains it and is overwritten by the next one; nothing of it is returned but the update. Fused
in-place optimizer kernels keep a local step as cheap as one of a plain loop.

Nothing is drawn here (`client_draws.py`). All batch shapes depend on the number of the client's
examples alone: the last batch of an epoch is short, never padded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from fedemb.config import LocalTrainingConfig
from fedemb.engine.clients.augmentation import DRAWS, augment
from fedemb.engine.clients.client_draws import LocalData
from fedemb.engine.clients.heads import prototype_head
from fedemb.engine.clients.objective import ADAM_BETA_2, ADAM_EPSILON, PROTOTYPE_BATCH, Objective
from fedemb.models.losses import build_loss, penalized

Phase = Literal["joint", "head", "backbone"]


class Worker:
    """Variables in which one virtual client after the other trains; one worker per core or device.

    Args:
      objective: what trains.
      index: number of the worker, for names only.
    """

    def __init__(self, objective: Objective, index: int) -> None:
        import tensorflow as tf

        def make(shape: Sequence[int | None], kind: str) -> Any:
            known = [n or 0 for n in shape]
            return tf.Variable(
                tf.zeros(known), shape=shape, trainable=False, name=f"worker{index}_{kind}"
            )

        config = objective.config
        per_weight = 2 if config.optimizer == "adam" else int(config.client_momentum > 0)
        body = [tuple(int(n) for n in v.shape) for v in objective.variables]
        head = (objective.shared_head_rows or None, objective.dim)
        self.weights = [make(shape, "weight") for shape in body]
        self.head = make(head, "head")
        self.slots = [[make(shape, "slot") for _ in range(per_weight)] for shape in [*body, head]]

    def start(self, values: Sequence[Any]) -> None:
        """Overwrites whatever the last client left behind; `values` are weights, then the head."""
        import tensorflow as tf

        for variable, value, slots in zip(
            [*self.weights, self.head], values, self.slots, strict=True
        ):
            variable.assign(value)
            for slot in slots:
                slot.assign(tf.zeros_like(value))


def first_head(objective: Objective, broadcast: Sequence[Any], examples: LocalData) -> Any:
    """Returns the initial head of a client, one row per label."""
    config = objective.config
    if config.head_init == "glorot":
        return examples.head
    import tensorflow as tf

    return prototype_head(
        lambda batch: objective.embeddings(broadcast, batch),
        examples.images,
        examples.rows,
        tf.shape(examples.head)[0],
        dim=objective.dim,
        batch_size=max(config.batch_size, PROTOTYPE_BATCH),
    )


def apply_gradient(
    config: LocalTrainingConfig, trained: Any, *, gradient: Any, rate: float, step: Any
) -> None:
    """One optimizer step in place, on a variable and its slots."""
    import tensorflow as tf

    variable, slots = trained
    if config.optimizer == "adam":
        time = tf.cast(step + 1, tf.float32)
        tf.raw_ops.ResourceApplyAdam(
            var=variable.handle,
            m=slots[0].handle,
            v=slots[1].handle,
            beta1_power=tf.pow(config.client_momentum, time),
            beta2_power=tf.pow(ADAM_BETA_2, time),
            lr=rate,
            beta1=config.client_momentum,
            beta2=ADAM_BETA_2,
            epsilon=ADAM_EPSILON,
            grad=gradient,
        )
    elif slots:
        tf.raw_ops.ResourceApplyMomentum(
            var=variable.handle,
            accum=slots[0].handle,
            lr=rate,
            grad=gradient,
            momentum=config.client_momentum,
        )
    else:
        tf.raw_ops.ResourceApplyGradientDescent(var=variable.handle, alpha=rate, delta=gradient)


def _complete(gradients: Sequence[Any]) -> list[Any]:
    """The same gradients, after all are computed: no weight has to be copied before its update."""
    import tensorflow as tf

    with tf.control_dependencies(gradients):
        return [tf.identity(gradient) for gradient in gradients]


def train_client(
    objective: Objective, worker: Worker, broadcast: Sequence[Any], examples: LocalData
) -> tuple[list[Any], Any]:
    """Trains one virtual client and returns its update.

    Args:
      objective: backbone, trained variables, local configuration.
      worker: variables to train in.
      broadcast: float32 tensors of `objective.shapes`, the weights all clients start from.
      examples: of the virtual client.

    Returns:
      The update, trained minus broadcast, float32 tensors of `objective.shapes`; and float32 `[2]`:
      mean loss of the first and of the last epoch. Not clipped, not checked for finiteness: the
      mechanism does both.
    """
    import tensorflow as tf

    config = objective.config
    images, rows = examples.images, examples.rows
    count = tf.shape(rows)[0]

    backbone, shared = list(broadcast), bool(objective.shared_head_rows)
    head = backbone.pop() if shared else first_head(objective, backbone, examples)
    worker.start([*backbone, head])

    loss = build_loss(config.loss)
    per_epoch = -(-count // config.batch_size)
    total = per_epoch * config.epochs

    def step(index: Any, losses: Any, phase: Phase) -> tuple[Any, Any]:
        epoch = index // per_epoch
        offset = (index - epoch * per_epoch) * config.batch_size
        size = tf.minimum(config.batch_size, count - offset)
        visits = slice(epoch * count + offset, epoch * count + offset + size)
        chosen = examples.order[visits]
        batch, wanted = tf.gather(images, chosen), tf.gather(rows, chosen)
        if config.augmentation is not None:
            draws = tf.transpose(tf.reshape(examples.draws[visits], [-1, DRAWS]))
            batch, wanted = augment(batch, wanted, config.augmentation, lambda _: draws)
        weights = [v.read_value() for v in worker.weights]
        current = worker.head.read_value()
        learners = {
            "joint": [*weights, current],
            "head": [current],
            "backbone": weights,
        }[phase]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(learners)
            embeddings = objective.embeddings(weights, batch)
            value = penalized(loss(embeddings, current, wanted), objective.variables, weights)
        gradients = _complete(
            tape.gradient(value, learners, unconnected_gradients=tf.UnconnectedGradients.ZERO)
        )
        trained = list(zip([*worker.weights, worker.head], worker.slots, strict=True))
        trained = {"joint": trained, "head": trained[-1:], "backbone": trained[:-1]}[phase]
        for pair, gradient in zip(trained, gradients, strict=True):
            rate = config.client_learning_rate
            if pair[0] is worker.head:
                rate *= config.head_learning_rate_scale
            apply_gradient(config, pair, gradient=gradient, rate=rate, step=index)
        share = value / tf.cast(per_epoch, tf.float32)
        first = tf.where(epoch == 0, share, 0.0)
        last = tf.where(epoch == config.epochs - 1, share, 0.0)
        return index + 1, losses + tf.stack([first, last])

    def steps(start: Any, stop: Any, losses: Any, phase: Phase) -> Any:
        return tf.while_loop(
            lambda index, _: index < stop,
            lambda index, losses: step(index, losses, phase),
            (start, losses),
            parallel_iterations=1,
        )

    state = (tf.constant(0), tf.zeros([2]))
    if config.reconstruction_steps:
        state = steps(*state[:1], tf.minimum(config.reconstruction_steps, total), state[1], "head")
        state = steps(state[0], total, state[1], "backbone")
    else:
        state = steps(state[0], total, state[1], "joint")

    ends = [v.read_value() for v in worker.weights] + ([worker.head.read_value()] if shared else [])
    starts = [*backbone, head] if shared else backbone
    return [end - start for end, start in zip(ends, starts, strict=True)], state[1]
