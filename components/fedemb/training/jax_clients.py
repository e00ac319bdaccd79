"""Local training of one virtual client on JAX: the steps of `train_client` in fixed shapes.

Under `vmap`, clients train in parallel. Each client has its own loop length, and a finished client
keeps its state while others continue. The last short batch of an epoch and the head are padded; the
padding has neither loss nor gradient.
"""

# The numeric libraries are not fully typed; the project's own signatures are checked.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Generic, NamedTuple

import numpy as np
from typing_extensions import override

from fedemb.config import LocalTrainingConfig
from fedemb.models.keras_backend import JaxArray, JaxDevice, Model, Part, Variable
from fedemb.models.losses import Real, build_loss, unit_rows
from fedemb.models.processor_forms import rewritten_for_cpu
from fedemb.privacy.running import Mechanism
from fedemb.training.clients import (
    DRAWS,
    PROTOTYPE_BATCH,
    ClientRounds,
    Objective,
    augment,
    no_data,
    type_of,
)
from fedemb.training.jax_rounds import JaxRounds, on_each_device
from fedemb.training.rounds import ClientExamples

if TYPE_CHECKING:
    import jax

_State = tuple[list["jax.Array"], list[list["jax.Array"]], "jax.Array"]
"""Trained weights, the head last; slots of each; losses of the first and last epoch."""


class Client(NamedTuple):
    """`LocalData` of one virtual client, padded to shapes that all clients share. Raw."""

    images: jax.Array
    """uint8 `[max_examples_per_client, size, size, channels]`, then zeros."""
    rows: jax.Array
    """int32 `[max_examples_per_client]`."""
    order: jax.Array
    """int32, all epochs concatenated, then at least one batch of zeros."""
    draws: jax.Array
    """float32 `[visits, copies, DRAWS]`, padded like `order`."""
    head: jax.Array
    """float32 `[max_examples_per_client, dim]`; no rows if the head is shared."""
    examples: jax.Array
    """int32 scalar: number of examples."""
    classes: jax.Array
    """int32 scalar: number of rows of the head that the client uses."""


class _LocalSteps:
    """The local steps of one virtual client, as pure functions for `fori_loop`."""

    def __init__(self, objective: Objective, client: Client, head_rows: int) -> None:
        import jax.numpy as jnp

        config = objective.config
        self._objective, self._client, self._config = objective, client, config
        self._loss = build_loss(config.loss)
        self._classes = jnp.arange(head_rows) < (objective.shared_head_rows or client.classes)
        self._per_epoch = -(-client.examples // config.batch_size)
        self.total = self._per_epoch * config.epochs

    def step(self, index: jax.Array, state: _State) -> _State:
        """Takes one step; returns weights, slots and losses after it."""
        import jax
        import jax.numpy as jnp

        learners, slots, losses = state
        if self._config.refresh_prototypes and not self._objective.shared_head_rows:
            learners = [*learners[:-1], self._refreshed(index, learners)]
        epoch = index // self._per_epoch
        batch = self._batch(index, epoch)
        value, gradients = jax.value_and_grad(self._value)(learners, *batch)
        moved, new_slots = [], []
        for number in range(len(learners)):
            after = self._moved(number, learners[number], slots[number], gradients[number])
            moved.append(after[0])
            new_slots.append(after[1])
        share = value / self._per_epoch.astype("float32")
        ends = jnp.stack([epoch == 0, epoch == self._config.epochs - 1])
        return moved, new_slots, losses + jnp.where(ends, share, 0.0)

    def _refreshed(self, index: jax.Array, learners: Sequence[jax.Array]) -> jax.Array:
        """Returns the head of a step: new class means at the start of an epoch."""
        import jax

        *weights, head = learners
        return jax.lax.cond(
            index % self._per_epoch == 0,
            lambda: _prototypes(self._objective, weights, self._client),
            lambda: head,
        )

    def _value(
        self, learners: Sequence[jax.Array], images: jax.Array, rows: jax.Array, real: jax.Array
    ) -> jax.Array:
        """Returns the loss of a padded batch; `real` selects its examples."""
        *weights, head = learners
        embeddings = rewritten_for_cpu(self._objective.embeddings)(weights, images)
        return self._loss(embeddings, head, rows, Real(real, self._classes))

    def _batch(self, index: jax.Array, epoch: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns augmented images of a step, their rows of the head, and which are not padding."""
        import jax
        import jax.numpy as jnp

        config, client, size = self._config, self._client, self._config.batch_size
        offset = (index - epoch * self._per_epoch) * size
        first = epoch * client.examples + offset
        chosen = jax.lax.dynamic_slice_in_dim(client.order, first, size)
        real = offset + jnp.arange(size) < client.examples
        images, rows = client.images[chosen], client.rows[chosen]
        if config.augmentation is None:
            return images, rows, real
        numbers = jax.lax.dynamic_slice_in_dim(client.draws, first, size)
        draws = numbers.reshape(-1, DRAWS).T
        return augment(images, config.augmentation, lambda _: draws), rows, real

    def _moved(
        self, number: int, value: jax.Array, slots: list[jax.Array], gradient: jax.Array
    ) -> tuple[jax.Array, list[jax.Array]]:
        """Returns a weight and its slots after one step; the head is the last weight."""
        rate = self._config.client_learning_rate
        if number == len(self._objective.variables):
            rate *= self._config.head_learning_rate_scale
        if slots:
            momentum = self._config.client_momentum * slots[0] + gradient
            return value - rate * momentum, [momentum]
        return value - rate * gradient, []


def train_client(
    objective: Objective, broadcast: Sequence[jax.Array], client: Client
) -> tuple[list[jax.Array], jax.Array]:
    """Trains one virtual client and returns its update; see `local_training.train_client`.

    Args:
      objective: backbone, trained variables, local configuration.
      broadcast: float32 `objective.shapes`, initial weights of all clients, on this device.
      client: data of the client.
    """
    import jax
    import jax.numpy as jnp

    config, starts = objective.config, list(broadcast)
    if not objective.shared_head_rows:
        starts.append(_first_head(objective, broadcast, client))
    steps = _LocalSteps(objective, client, len(starts[-1]))
    kept = int(config.client_momentum > 0)
    slots = on_each_device([[jnp.zeros(s.shape, s.dtype) for _ in range(kept)] for s in starts])
    losses = on_each_device(jnp.zeros(2, "float32"))
    learners, _, losses = jax.lax.fori_loop(0, steps.total, steps.step, (starts, slots, losses))
    # The update has no local head: the shorter list ends the zip.
    return [end - start for end, start in zip(learners, broadcast, strict=False)], losses


def _first_head(objective: Objective, broadcast: Sequence[jax.Array], client: Client) -> jax.Array:
    """Returns the initial head of a client."""
    if objective.config.head_init == "glorot":
        return client.head
    return _prototypes(objective, broadcast, client)


def _prototypes(objective: Objective, weights: Sequence[jax.Array], client: Client) -> jax.Array:
    """Returns normalised class means of a client's embeddings, computed in batches of images."""
    import jax
    import jax.numpy as jnp

    config = objective.config
    size = max(config.batch_size, PROTOTYPE_BATCH)
    head = client.head

    def add(index: jax.Array, total: jax.Array) -> jax.Array:
        places = index * size + jnp.arange(size)
        real = places < client.examples
        images = jnp.take(client.images, places, axis=0, mode="clip")
        rows = jnp.take(client.rows, places, mode="clip")
        unit = unit_rows(rewritten_for_cpu(objective.embeddings)(weights, images))
        member = (jnp.arange(len(head))[:, None] == rows[None, :]) & real[None, :]
        return total + jnp.matmul(member.astype("float32"), unit)

    empty = on_each_device(jnp.zeros(head.shape, "float32"))
    return unit_rows(jax.lax.fori_loop(0, -(-client.examples // size), add, empty))


# The round of DP-FedEmb on JAX: virtual clients side by side under `vmap`, on every device.
#
# The same records as `RoundFunction` makes, of the same orders, heads and draws.


SIDE_BY_SIDE = 8
"""Default number of virtual clients per device."""


class ClientShare(NamedTuple, Generic[Part]):
    """Virtual clients of one step: fields of `Client`, stacked. Raw."""

    images: Part
    rows: Part
    order: Part
    draws: Part
    head: Part
    examples: Part
    classes: Part
    real: Part
    """int32 scalar: number of clients; the rest is padding."""


class JaxRoundFunction(ClientRounds, JaxRounds[ClientShare[np.ndarray], ClientShare[JaxArray]]):
    """Trains the virtual clients of a round and sums their updates, on JAX.

    Args:
      backbone: see `RoundFunction`.
      mechanism: clips and rounds each update.
      config: local training.
      variables: backbone variables that train; default all trainable ones.
      seed: seed of shuffles, augmentation and heads; never of noise or sampling.
      parallel_clients: clients per device in one step; changes the bits. 0 means 8.
      devices: devices to use. None uses all devices.
      shared_head_rows: DP-FedAvg, see `Objective`.
    """

    probe_units = 16
    layout = "training.parallel_clients"

    def __init__(
        self,
        backbone: Model,
        mechanism: Mechanism,
        config: LocalTrainingConfig,
        *,
        variables: Sequence[Variable] | None = None,
        seed: int = 0,
        parallel_clients: int = 0,
        devices: Sequence[JaxDevice] | None = None,
        shared_head_rows: int = 0,
    ) -> None:
        super().__init__(
            self._set_model(backbone, config, variables, shared_head_rows),
            mechanism,
            together=parallel_clients or SIDE_BY_SIDE,
            steps=1,
            smaller="training.parallel_clients or training.local.max_examples_per_client",
            seed=seed,
            devices=devices,
        )
        self.shared_head_rows = shared_head_rows
        self._no_client = no_data(config, self._image, self.objective.dim)

    def _generated_unit(self, group: int, random: np.random.Generator) -> ClientExamples:
        config = self.objective.config
        # Different sizes, because finished clients wait. A single class has no gradient.
        count = min(config.max_examples_per_client, 2 + group % (2 * config.batch_size))
        images = random.integers(0, 256, (count, *self._image)).astype(type_of(self._image))
        rows = min(3, self.objective.shared_head_rows or 3)
        return ClientExamples(0, group, images, np.arange(count) % rows)

    def _share(
        self, units: Sequence[ClientExamples], round_index: int, multiple: int
    ) -> ClientShare[np.ndarray]:
        config, most = self.objective.config, self.objective.config.max_examples_per_client
        places = -(-len(units) // multiple) * multiple
        visits = config.epochs * most + config.batch_size
        heads = 0 if self.objective.shared_head_rows else most
        arrays = [
            np.zeros((places, length, *part.shape[1:]), part.dtype)
            for length, part in zip(
                (most, most, visits, visits, heads), self._no_client, strict=True
            )
        ]
        examples, classes = np.zeros(places, np.int32), np.zeros(places, np.int32)
        for place, unit in enumerate(units):
            data = self._data(unit, round_index)
            for array, part in zip(arrays, data, strict=True):
                array[place, : len(part)] = part
            examples[place], classes[place] = len(data.rows), len(data.head)
        return ClientShare._make([*arrays, examples, classes, np.array(len(units), np.int32)])

    @override
    def _records(
        self, broadcast: list[JaxArray], units: ClientShare[JaxArray]
    ) -> tuple[JaxArray, JaxArray]:
        import jax
        import jax.numpy as jnp

        objective = self.objective.on_this_device()
        train = jax.vmap(partial(train_client, objective, broadcast))
        with jax.enable_x64(False):  # only clip and sum use 64 bits
            updates, losses = train(Client(*units[:-1]))
        flat = jnp.concatenate([u.reshape(self._parallel_units, -1) for u in updates], axis=1)
        norms = jnp.sqrt(jnp.sum(jnp.square(flat.astype("float64")), axis=1))
        rows = jnp.stack([norms, losses[:, 0], losses[:, 1], units.examples], axis=1)
        return flat, rows.astype("float32")
