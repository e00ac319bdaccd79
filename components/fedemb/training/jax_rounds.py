"""Rounds on JAX: units in parallel on each device, with integer sums by `psum`.

One function is compiled for a fixed number of units on all devices, independent of the size of the
round. Units are vectorized by `vmap`, and each is clipped in float64. Integer sums do not depend on
order, so one device and many devices give the same bits.
"""

# The numeric libraries are not fully typed; the project's own signatures are checked.
# pyright: reportPrivateUsage=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar, cast

import numpy as np
from jaxtyping import Float32
from typing_extensions import override

from fedemb.config import UnitGradientConfig
from fedemb.errors import ConfigError
from fedemb.models.keras_backend import (
    JaxArray,
    JaxDevice,
    Model,
    Variable,
    exact_numbers,
    jax_devices,
)
from fedemb.privacy.running import Mechanism
from fedemb.training import host_messages as hosts
from fedemb.training.host_messages import Message
from fedemb.training.rounds import (
    STATISTICS,
    ClientExamples,
    Padded,
    RoundSums,
    Slab,
    Units,
    VectorizedRounds,
)
from fedemb.training.units import SLAB_MICROBATCHES, UnitRounds, UnitShare

if TYPE_CHECKING:
    from jax.sharding import NamedSharding

Tree = TypeVar("Tree")
"""Nested arrays."""
DeviceUnits = TypeVar("DeviceUnits", bound="Padded[JaxArray]")
"""Padded units on a device."""
_UNITS = "units"
"""Axis of the mesh of devices."""


class JaxRounds(VectorizedRounds[Units], Generic[Units, DeviceUnits]):
    """Base class of rounds on JAX.

    With several hosts, the chief calls `run` and the other hosts call `follow`.

    Args:
      shapes: see `SlabRounds`.
      mechanism: see `SlabRounds`.
      together: units per device in one step.
      steps: maximum number of steps in one slab.
      smaller: settings to lower if a step does not fit into memory.
      seed: see `SlabRounds`.
      devices: devices, with separate units each. None uses all devices.
    """

    shared_head_rows = 0
    """Rows of the shared head, DP-FedAvg only."""

    def __init__(
        self,
        shapes: Sequence[tuple[int, ...]],
        mechanism: Mechanism,
        *,
        together: int,
        steps: int,
        smaller: str,
        seed: int,
        devices: Sequence[JaxDevice] | None,
    ) -> None:
        import jax
        from jax.sharding import Mesh, NamedSharding
        from jax.sharding import PartitionSpec as Spec

        mesh = Mesh(np.array(devices or jax_devices()), (_UNITS,))
        super().__init__(
            shapes,
            mechanism,
            slab_units=steps * together * mesh.size,
            seed=seed,
            worker_count=mesh.size,
        )
        self._parallel_units, self._smaller = together, smaller
        spread, whole = Spec(_UNITS), Spec()
        self._everywhere, self._spread = NamedSharding(mesh, whole), NamedSharding(mesh, spread)
        self._add = jax.jit(
            jax.shard_map(
                self._step, mesh=mesh, in_specs=(whole, whole, spread), out_specs=(whole, whole)
            ),
            donate_argnums=0,
        )

    def _any_step(self) -> Units:
        unit = self._generated_unit(0, np.random.default_rng(0))
        share = self._share([unit], 0, self._parallel_units * self.worker_count)
        return next(self._steps(share))[0]

    @property
    def together(self) -> int:
        """Units per device in one step."""
        return self._parallel_units

    @abstractmethod
    def _records(self, broadcast: list[JaxArray], units: DeviceUnits) -> tuple[JaxArray, JaxArray]:
        """Returns updates `[together, dim]` and their `STATISTICS`, float32, on one device."""

    def _pack(self, units: Sequence[ClientExamples], round_index: int) -> Slab:
        return Slab(self._share(units, round_index, self._parallel_units * self.worker_count))

    def _steps(self, share: Units) -> Iterator[tuple[Units, int]]:
        """Yields the units of each step, with counts per device, and their total number."""
        size = self._parallel_units
        all_devices = size * self.worker_count
        for start in range(0, len(share[0]), all_devices):
            real = min(all_devices, int(share.real) - start)
            counts = np.clip(real - size * np.arange(self.worker_count), 0, size)
            parts = [part[start : start + all_devices] for part in share[:-1]]
            yield share._make([*parts, counts.astype(np.int32)]), real

    def _sums(self, weights: Float32[np.ndarray, " dim"], slabs: Iterable[Slab]) -> RoundSums:
        statistics = [np.zeros((0, len(STATISTICS)), np.float32)]
        running: list[tuple[JaxArray, int]] = []
        with self._exact_numbers():
            sums, broadcast = self._begin(weights)
            for slab in slabs:
                for step, real in self._steps(cast("Units", slab)):
                    sums, rows = self._advanced(sums, broadcast, step)
                    running.append((rows, real))
                    if len(running) > 1:  # overlap one step; more would need memory
                        statistics.append(_rows(*running.pop(0)))
            statistics += [_rows(*step) for step in running]
            return RoundSums(np.asarray(sums), np.concatenate(statistics))

    def _begin(self, weights: np.ndarray) -> tuple[JaxArray, list[JaxArray]]:
        """Returns an empty sum and the weights, on every device of every host."""
        hosts.send(Message.BEGIN, weights)
        return self._begun(weights)

    def _begun(self, weights: np.ndarray) -> tuple[JaxArray, list[JaxArray]]:
        # Same placement as results of the function; otherwise the second step recompiles.
        broadcast = [_placed(part, self._everywhere) for part in self._split(weights)]
        return _placed(np.zeros(self.dim, np.int64), self._everywhere), broadcast

    def _advanced(
        self, sums: JaxArray, broadcast: list[JaxArray], step: Units
    ) -> tuple[JaxArray, JaxArray]:
        """Returns the sum after a step, and the statistics of its units."""
        hosts.send(Message.STEP, *step)
        return self._add(sums, broadcast, self._spread_out(step))

    def _spread_out(self, step: Units) -> Units:
        """Returns the units of a step, each on its device."""
        return step._make(_placed(part, self._spread) for part in step)

    def follow(self) -> None:
        """Computes the steps that the chief sends, until it sends the end.

        Raises:
          StorageError: the chief or another host was lost.
        """
        step = self._any_step()
        state: tuple[JaxArray, list[JaxArray]] | None = None
        with self._exact_numbers():
            while True:
                message, body = hosts.receive()
                if message is Message.BEGIN:
                    state = self._begun(np.frombuffer(body, np.float32))
                elif message is Message.STEP and state is not None:
                    given = step._make(hosts.decoded_arrays(body, step))
                    state = self._add(*state, self._spread_out(given))[0], state[1]
                else:
                    return

    def _sums_by_worker(
        self, weights: np.ndarray, units: Sequence[ClientExamples]
    ) -> list[np.ndarray]:
        size, workers = self._parallel_units, self.worker_count
        share, found = self._share(units, 0, size), []
        with self._exact_numbers():
            for worker in range(workers):
                sums, begun = self._begin(weights)
                for start in range(0, len(share[0]), size):
                    # Other devices get rotated units, which are not counted.
                    parts = [
                        np.concatenate(
                            [
                                np.roll(part[start : start + size], other != worker, 0)
                                for other in range(workers)
                            ]
                        )
                        for part in share[:-1]
                    ]
                    counts = np.zeros(workers, np.int32)
                    counts[worker] = min(size, int(share.real) - start)
                    sums, _ = self._advanced(sums, begun, share._make([*parts, counts]))
                found.append(np.asarray(sums))
        return found

    def _step(
        self, sums: JaxArray, broadcast: list[JaxArray], units: DeviceUnits
    ) -> tuple[JaxArray, JaxArray]:
        """Adds the records of each device to the sum; also returns their `STATISTICS`."""
        import jax
        import jax.numpy as jnp

        # Weights vary by device: for shared weights, JAX would sum the gradients of all devices
        # before the clip.
        updates, rows = self._records(on_each_device(broadcast), units)
        records = jax.vmap(lambda update: self.mechanism.record([update]))(updates)
        real = jnp.arange(self._parallel_units) < units.real[0]
        # Padding adds zero, whatever its record is.
        mine = jnp.sum(jnp.where(real[:, None], records, 0), axis=0)
        # Each device fills its own rows; the other rows are zero.
        every = jnp.zeros((self.worker_count, *rows.shape), rows.dtype)
        every = on_each_device(every).at[jax.lax.axis_index(_UNITS)].set(rows)
        rows = jax.lax.psum(every, _UNITS).reshape(-1, rows.shape[1])
        return sums + jax.lax.psum(mine, _UNITS), rows

    @contextmanager
    def _exact_numbers(self) -> Generator[None]:
        """Enables 64 bits for clip and sum, and translates errors of memory and hosts.

        Raises:
          ConfigError: the device has too little memory.
          StorageError: a host of the job was lost.
        """
        import jax

        try:
            with (
                exact_numbers(),
                hosts.lost_host_errors() if hosts.is_multi_host() else nullcontext(),
            ):
                yield
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            raise ConfigError(
                f"The device ran out of memory in a step of {self._parallel_units} in parallel. "
                f"Lower {self._smaller}."
            ) from error


def on_each_device(tree: Tree) -> Tree:
    """Returns the same arrays marked as varying by device, inside a step."""
    import jax

    return jax.tree.map(lambda leaf: jax.lax.pcast(leaf, _UNITS, to="varying"), tree)


def _placed(part: np.ndarray, sharding: NamedSharding) -> JaxArray:
    """Places an array that every host has, each shard on its device."""
    import jax

    return jax.make_array_from_callback(part.shape, sharding, part.__getitem__)


def _rows(rows: JaxArray, real: int) -> np.ndarray:
    return np.asarray(rows)[:real]


# DP-SGD rounds on JAX, with the records of `UnitGradientFunction`.
#
# Units of a micro-batch are vectorized by `vmap`.


class JaxUnitGradientFunction(UnitRounds, JaxRounds[UnitShare[np.ndarray], UnitShare[JaxArray]]):
    """Sums the clipped mean gradients of the units of a round, on JAX.

    Args:
      classifier: `keras.Model` of `build_classifier`; not changed by rounds.
      mechanism: clips and rounds each record.
      config: micro-batches, views.
      variables: variables that train.
      seed: seed of the views; never of noise or sampling.
      devices: devices, with a separate micro-batch each. None uses all devices.
    """

    def __init__(
        self,
        classifier: Model,
        mechanism: Mechanism,
        config: UnitGradientConfig,
        *,
        variables: Sequence[Variable],
        seed: int = 0,
        devices: Sequence[JaxDevice] | None = None,
    ) -> None:
        super().__init__(
            self._set_model(classifier, config, variables),
            mechanism,
            together=config.microbatch,
            steps=SLAB_MICROBATCHES,
            smaller="training.unit_gradient.microbatch, views or images_per_unit",
            seed=seed,
            devices=devices,
        )

    @override
    def _records(
        self, broadcast: list[JaxArray], units: UnitShare[JaxArray]
    ) -> tuple[JaxArray, JaxArray]:
        import jax
        import jax.numpy as jnp

        record = jax.vmap(partial(self._record, broadcast))
        updates, losses = record(self._views(units), units.labels, units.weights)
        norms = jnp.sqrt(jnp.sum(jnp.square(updates.astype("float64")), axis=1))
        images = jnp.count_nonzero(units.weights, axis=1)
        return updates, jnp.stack([norms, losses, losses, images], axis=1).astype("float32")

    def _record(
        self, broadcast: list[JaxArray], images: JaxArray, labels: JaxArray, weights: JaxArray
    ) -> tuple[JaxArray, JaxArray]:
        """Returns the negative mean gradient of a unit, float32 `[dim]`, and its loss."""
        import jax
        import jax.numpy as jnp

        views = self._config.views
        labels = jnp.repeat(labels, views)
        weights = jnp.repeat(weights / float(views), views)

        def loss(trained: list[JaxArray]) -> JaxArray:
            chances = jax.nn.log_softmax(self._logits(trained, images))
            return -jnp.sum(weights * jnp.take_along_axis(chances, labels[:, None], 1)[:, 0])

        value, gradients = jax.value_and_grad(loss)(broadcast)
        return jnp.concatenate([-jnp.ravel(part) for part in gradients]), value
