"""The round of DP-FedEmb on JAX: virtual clients side by side under `vmap`, on every device.

The same records as `RoundFunction` makes, of the same orders, heads and draws.
"""

# TensorFlow, Keras, JAX and SciPy are not fully typed; the project's own signatures are checked.
# pyright: reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Generic, NamedTuple

import numpy as np
from typing_extensions import override

from fedemb.config import LocalTrainingConfig
from fedemb.engine.clients.client_draws import no_data, type_of
from fedemb.engine.jax.local_training import Client, train_client
from fedemb.engine.jax.rounds import JaxRounds
from fedemb.engine.rounds import ClientExamples, ClientRounds
from fedemb.models.arrays import JaxArray, JaxDevice, Model, Part, Variable
from fedemb.privacy.queries import Mechanism, Parameters

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
        self, broadcast: list[JaxArray], units: ClientShare[JaxArray], clip: Parameters
    ) -> tuple[JaxArray, JaxArray]:
        import jax
        import jax.numpy as jnp

        del clip
        objective = self.objective.on_this_device()
        train = jax.vmap(partial(train_client, objective, broadcast))
        with jax.enable_x64(False):  # only clip and sum use 64 bits
            updates, losses = train(Client(*units[:-1]))
        flat = jnp.concatenate([u.reshape(self._parallel_units, -1) for u in updates], axis=1)
        norms = jnp.sqrt(jnp.sum(jnp.square(flat.astype("float64")), axis=1))
        rows = jnp.stack([norms, losses[:, 0], losses[:, 1], units.examples], axis=1)
        return flat, rows.astype("float32")
