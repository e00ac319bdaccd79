"""Rounds on JAX: some units on each device side by side, their integers added up by `psum`.

One compiled function takes as many units as all devices hold at once, whatever the size of the
round; it is compiled once. Units lie under `vmap`, each clipped in float64. Integer sums have no
order, so one device and many give the same bits.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
from jaxtyping import Float32

from fedemb.engine import hosts
from fedemb.engine.hosts import Message
from fedemb.engine.rounds import STATISTICS, ClientExamples, RoundSums, Slab
from fedemb.engine.vectorized_rounds import VectorizedRounds
from fedemb.errors import ConfigError
from fedemb.models.keras_backend import exact_numbers, jax_devices

_UNITS = "units"
"""Axis of the mesh of devices."""


class JaxRounds(VectorizedRounds):
    """What rounds on JAX share.

    On a job of several hosts the chief calls them and the others `follow`.

    Args:
      shapes: see `SlabRounds`.
      mechanism: see `SlabRounds`.
      together: units side by side on each device.
      steps: of all devices together, in one slab at most.
      smaller: the settings to lower where memory ends.
      seed: see `SlabRounds`.
      devices: `jax.Device`s, each with units of its own. None: all there are.
    """

    shared_head_rows = 0
    """Of DP-FedAvg."""

    def __init__(
        self,
        shapes: Sequence[tuple[int, ...]],
        mechanism: Any,
        *,
        together: int,
        steps: int,
        smaller: str,
        seed: int,
        devices: Sequence[Any] | None,
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
        self._local_devices = mesh.local_devices
        spread, whole = Spec(_UNITS), Spec()
        self._everywhere, self._spread = NamedSharding(mesh, whole), NamedSharding(mesh, spread)
        self._add = jax.jit(
            jax.shard_map(
                self._step,
                mesh=mesh,
                in_specs=(whole, whole, spread, whole),
                out_specs=(whole, whole),
            ),
            donate_argnums=0,
        )

    def run(
        self, weights: Float32[np.ndarray, " dim"], slabs: Iterable[Slab], parameters: Any
    ) -> RoundSums:
        """See `VectorizedRounds`; calls `require_room` before the first slab is read.

        Raises:
          ConfigError: a step does not fit into device memory.
        """
        if not self._layout_checked:
            self.require_room()
        return super().run(weights, slabs, parameters)

    def require_room(self) -> None:
        """Plans the memory of a step from the net and the device, before anything is computed.

        Raises:
          ConfigError: a device has less.
        """
        room = min((memory_of(device) for device in self._local_devices), default=0)
        if room and not hosts.is_multi_host() and (needed := self.step_bytes()) > room:
            raise ConfigError(
                f"A step of {self._parallel_units} in parallel needs {needed / 2**20:.0f} MiB of "
                f"device memory, and the device has {room / 2**20:.0f} MiB. Lower {self._smaller} "
                f"to about {max(1, self._parallel_units * room // needed)}."
            )

    def step_bytes(self) -> int:
        """What one step takes on each device, as the compiler plans it. It is compiled once."""
        with self._exact_numbers():
            sums, (broadcast, clip) = self._begun(
                np.zeros(self.dim, np.float32), self.mechanism.sample_params()
            )
            step = self._placed(self._any_step(), self._spread)
            compiled = self._add.lower(sums, broadcast, step, clip).compile()
        found: Any = compiled.memory_analysis()
        parts = found.argument_size_in_bytes, found.output_size_in_bytes, found.temp_size_in_bytes
        return sum(parts) - found.alias_size_in_bytes

    def _any_step(self) -> Any:
        unit = self._generated_unit(0, np.random.default_rng(0))
        share = self._share([unit], 0, self._parallel_units * self.worker_count)
        return next(self._steps(share))[0]

    @property
    def together(self) -> int:
        """Units side by side on each device."""
        return self._parallel_units

    @abstractmethod
    def _records(self, broadcast: Any, units: Any, clip: Any) -> tuple[Any, Any]:
        """Updates `[together, dim]` and their `STATISTICS`, float32, on one device."""

    def _pack(self, units: Sequence[ClientExamples], round_index: int) -> Slab:
        return [self._share(units, round_index, self._parallel_units * self.worker_count)]

    def _steps(self, share: Any) -> Iterator[tuple[Any, int]]:
        """Units for each device, the real ones counted, and how many are real in all."""
        size = self._parallel_units
        all_devices = size * self.worker_count
        for start in range(0, len(share[0]), all_devices):
            real = min(all_devices, int(share.count) - start)
            counts = np.clip(real - size * np.arange(self.worker_count), 0, size)
            parts = [part[start : start + all_devices] for part in share[:-1]]
            yield share._make([*parts, counts.astype(np.int32)]), real

    def _sums(
        self, weights: Float32[np.ndarray, " dim"], slabs: Iterable[Slab], parameters: Any
    ) -> RoundSums:
        statistics = [np.zeros((0, len(STATISTICS)), np.float32)]
        running: list[tuple[Any, int]] = []
        with self._exact_numbers():
            sums, start = self._begin(weights, parameters)
            for (share,) in slabs:
                for step, real in self._steps(share):
                    sums, rows = self._advanced(sums, start, step)
                    running.append((rows, real))
                    if len(running) > 1:  # the next step is on its way; more would take memory
                        statistics.append(_rows(*running.pop(0)))
            statistics += [_rows(*step) for step in running]
            return RoundSums(tuple(map(np.asarray, sums)), np.concatenate(statistics))

    def _begin(self, weights: np.ndarray, clip: Any) -> tuple[Any, Any]:
        """Returns empty sums, and weights and clip, on every device of every host."""
        hosts.send(Message.BEGIN, weights, clip)
        return self._begun(weights, clip)

    def _begun(self, weights: np.ndarray, clip: Any) -> tuple[Any, Any]:
        # Placed as the function returns them, or the second step would be compiled again.
        empty = self.mechanism.initial_sample_state(self.dim)
        return self._placed(empty, self._everywhere), (
            self._placed(self._split(weights), self._everywhere),
            clip,
        )

    def _advanced(self, sums: Any, start: Any, step: Any) -> tuple[Any, Any]:
        """The sums with the units of a step, and their statistics."""
        hosts.send(Message.STEP, *step)
        return self._stepped(sums, start, step)

    def _stepped(self, sums: Any, start: Any, step: Any) -> tuple[Any, Any]:
        broadcast, clip = start
        return self._add(sums, broadcast, self._placed(step, self._spread), clip)

    @staticmethod
    def _placed(tree: Any, sharding: Any) -> Any:
        """Numbers that every host has, each part where it belongs."""
        import jax

        def place(part: Any) -> Any:
            part = np.asarray(part)
            return jax.make_array_from_callback(part.shape, sharding, part.__getitem__)

        return jax.tree.map(place, tree)

    def follow(self) -> None:
        """Computes what the chief says, until it says that all is done.

        Raises:
          StorageError: the chief or another host was lost.
        """
        step = self._any_step()
        state: Any = None
        with self._exact_numbers():
            while True:
                message, body = hosts.receive()
                if message is Message.BEGIN:
                    like = (np.zeros(self.dim, np.float32), self.mechanism.sample_params())
                    weights, clip = hosts.decoded_arrays(body, like)
                    state = self._begun(weights, np.float64(clip))
                elif message is Message.STEP:
                    sums, start = state
                    given = step._make(hosts.decoded_arrays(body, step))
                    state = self._stepped(sums, start, given)[0], start
                else:
                    return

    def _sums_by_worker(
        self, weights: np.ndarray, units: Sequence[ClientExamples]
    ) -> list[np.ndarray]:
        size, workers = self._parallel_units, self.worker_count
        share, found = self._share(units, 0, size), []
        with self._exact_numbers():
            for worker in range(workers):
                sums, begun = self._begin(weights, self.mechanism.sample_params())
                for start in range(0, len(share[0]), size):
                    # Other devices hold others at each place, none of them to be counted.
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
                    counts[worker] = min(size, int(share.count) - start)
                    sums, _ = self._advanced(sums, begun, share._make([*parts, counts]))
                found.append(np.concatenate([np.ravel(part) for part in sums]))
        return found

    def _step(self, sums: Any, broadcast: Any, units: Any, clip: Any) -> Any:
        """Adds the records of the units on each device; also returns their `STATISTICS`."""
        import jax
        import jax.numpy as jnp

        # Each device derives by weights of its own: by shared ones JAX would add up the gradients
        # of all devices, before any clip.
        updates, rows = self._records(on_each_device(broadcast), units, clip)
        records = jax.vmap(lambda update: self.mechanism.record(clip, [update]))(updates)
        real = jnp.arange(self._parallel_units) < units.count[0]

        def added(total: Any, part: Any) -> Any:
            # What fills the places adds nothing, whatever its record is.
            mine = jnp.where(real.reshape((-1,) + (1,) * (part.ndim - 1)), part, 0)
            return total + jax.lax.psum(jnp.sum(mine, axis=0), _UNITS)

        # Each device's rows at its own place: what is added to them is zero.
        every = jnp.zeros((self.worker_count, *rows.shape), rows.dtype)
        every = on_each_device(every).at[jax.lax.axis_index(_UNITS)].set(rows)
        rows = jax.lax.psum(every, _UNITS).reshape(-1, rows.shape[1])
        return tuple(map(added, sums, records)), rows

    @contextmanager
    def _exact_numbers(self) -> Iterator[None]:
        """Lets the clip and the sum have 64 bits; where memory ends, one sentence.

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


def on_each_device(tree: Any) -> Any:
    """The same values, as each device's own: inside a step they may then differ."""
    import jax

    return jax.tree.map(lambda leaf: jax.lax.pcast(leaf, _UNITS, to="varying"), tree)


def memory_of(device: Any) -> int:
    """Bytes that JAX may take on a device; 0 where it does not tell, as on a processor."""
    return (device.memory_stats() or {}).get("bytes_limit", 0)


def _rows(rows: Any, real: int) -> np.ndarray:
    return np.asarray(rows)[:real]
