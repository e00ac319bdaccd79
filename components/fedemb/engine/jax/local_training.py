"""Local training of one virtual client on JAX: the steps of `local_training.py` in fixed shapes.

Under `vmap`, clients train in parallel. Each client has its own loop length, and a finished client
keeps its state while others continue. The last short batch of an epoch and the head are padded; the
padding has neither loss nor gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from fedemb.config import LocalTrainingConfig
from fedemb.engine.clients.augmentation import DRAWS, augment
from fedemb.engine.clients.client_draws import copies
from fedemb.engine.clients.objective import ADAM_BETA_2, ADAM_EPSILON, PROTOTYPE_BATCH, Objective
from fedemb.engine.jax.rounds import on_each_device
from fedemb.models.losses import Real, build_loss, penalized, unit_rows


class Client(NamedTuple):
    """One virtual client, `LocalData` in the shapes of all. Raw."""

    images: Any
    """uint8 `[max_examples_per_client, size, size, channels]`, then zeros."""
    rows: Any
    """int32 `[max_examples_per_client]`."""
    order: Any
    """int32, all epochs one after the other, then zeros: a batch of them at least."""
    draws: Any
    """float32 `[visits, copies, DRAWS]`, as `order`."""
    head: Any
    """float32 `[max_examples_per_client, dim]`; of a shared one no rows."""
    examples: Any
    """int32 scalar: how many there are."""
    classes: Any
    """int32 scalar: how many rows of the head are the client's."""


def train_client(
    objective: Objective, broadcast: Sequence[Any], client: Client
) -> tuple[list[Any], Any]:
    """Trains one virtual client and returns its update; see `local_training.train_client`.

    Args:
      objective: backbone, trained variables, local configuration.
      broadcast: float32 `objective.shapes`, the weights all clients start from, of this device.
      client: data of the client.
    """
    import jax
    import jax.numpy as jnp

    config, count = objective.config, client.examples
    shared = bool(objective.shared_head_rows)
    starts = list(broadcast) if shared else [*broadcast, _first_head(objective, broadcast, client)]
    loss, size = build_loss(config.loss), config.batch_size
    classes = jnp.arange(len(starts[-1])) < (objective.shared_head_rows or client.classes)
    per_epoch = -(-count // size)
    rates = [config.client_learning_rate] * len(starts)
    rates[-1] *= config.head_learning_rate_scale

    def value(learners: Sequence[Any], images: Any, rows: Any, real: Any) -> Any:
        *weights, head = learners
        embeddings = objective.embeddings(weights, images)
        return penalized(
            loss(embeddings, head, rows, Real(real, classes)), objective.variables, weights
        )

    def step(index: Any, state: Any) -> Any:
        learners, slots, losses = state
        epoch = index // per_epoch
        offset = (index - epoch * per_epoch) * size
        first = epoch * count + offset
        chosen = jax.lax.dynamic_slice_in_dim(client.order, first, size)
        images, rows, real = (
            client.images[chosen],
            client.rows[chosen],
            offset + jnp.arange(size) < count,
        )
        if config.augmentation is not None:
            numbers = jax.lax.dynamic_slice_in_dim(client.draws, first, size)
            draws = numbers.reshape(-1, DRAWS).T
            images, rows = augment(images, rows, config.augmentation, lambda _: draws)
            real = jnp.repeat(real, copies(config))
        found, gradients = jax.value_and_grad(value)(learners, images, rows, real)
        moved, new_slots = [], []
        for number, learner in enumerate(learners):
            after = _moved(config, learner, slots[number], gradients[number], rates[number], index)
            if config.reconstruction_steps:
                heads_turn = index < config.reconstruction_steps
                trains = heads_turn == (number == len(learners) - 1)
                before = (learner, slots[number])
                after = jax.tree.map(partial(jnp.where, trains), after, before)
            moved.append(after[0])
            new_slots.append(after[1])
        share = found / per_epoch.astype("float32")
        ends = jnp.stack([epoch == 0, epoch == config.epochs - 1])
        return moved, new_slots, losses + jnp.where(ends, share, 0.0)

    kept = 2 if config.optimizer == "adam" else int(config.client_momentum > 0)
    slots = on_each_device([[jnp.zeros(s.shape, s.dtype) for _ in range(kept)] for s in starts])
    losses = on_each_device(jnp.zeros(2, "float32"))
    learners, _, losses = jax.lax.fori_loop(
        0, per_epoch * config.epochs, step, (starts, slots, losses)
    )
    # A local head stays here.
    return [end - start for end, start in zip(learners, broadcast, strict=False)], losses


def _moved(  # noqa: PLR0917 - a weight, what is kept of it, and the step
    config: LocalTrainingConfig, value: Any, slots: Any, gradient: Any, rate: float, step: Any
) -> tuple[Any, list[Any]]:
    """One optimizer step of a weight and its slots, as TensorFlow's kernels take it."""
    import jax.numpy as jnp

    if config.optimizer == "adam":
        time = (step + 1).astype("float32")
        bias = jnp.sqrt(1.0 - ADAM_BETA_2**time) / (1.0 - config.client_momentum**time)
        mean = slots[0] + (gradient - slots[0]) * (1.0 - config.client_momentum)
        square = slots[1] + (gradient * gradient - slots[1]) * (1.0 - ADAM_BETA_2)
        return value - rate * bias * mean / (jnp.sqrt(square) + ADAM_EPSILON), [mean, square]
    if slots:
        momentum = config.client_momentum * slots[0] + gradient
        return value - rate * momentum, [momentum]
    return value - rate * gradient, []


def _first_head(objective: Objective, broadcast: Sequence[Any], client: Client) -> Any:
    """Returns the initial head of a client; class means are computed in batches of images."""
    config = objective.config
    if config.head_init == "glorot":
        return client.head
    import jax
    import jax.numpy as jnp

    size = max(config.batch_size, PROTOTYPE_BATCH)
    head = client.head

    def add(index: Any, total: Any) -> Any:
        places = index * size + jnp.arange(size)
        real = places < client.examples
        images = jnp.take(client.images, places, axis=0, mode="clip")
        rows = jnp.take(client.rows, places, mode="clip")
        unit = unit_rows(objective.embeddings(broadcast, images))
        member = (jnp.arange(len(head))[:, None] == rows[None, :]) & real[None, :]
        return total + jnp.matmul(member.astype("float32"), unit)

    empty = on_each_device(jnp.zeros(head.shape, "float32"))
    return unit_rows(jax.lax.fori_loop(0, -(-client.examples // size), add, empty))
