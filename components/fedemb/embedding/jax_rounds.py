"""Rounds on JAX: some units on each device side by side, their integers added up by `psum`.

One compiled function takes as many units as all devices hold at once, whatever the size of the
round; it is compiled once. Units lie under `vmap`, each clipped in float64. Integer sums have no
order, so one device and many give the same bits.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32

from fedemb.backend import exact_numbers
from fedemb.embedding.rounds import STATISTICS, ClientExamples, RoundSums, Slab
from fedemb.embedding.side_by_side import SideBySide
from fedemb.errors import ConfigError

ACCELERATOR_FILES = ("/dev/nvidia0", "/dev/accel0", "/dev/vfio/0")
"""What a container sees of an accelerator it was given: NVIDIA's, and Google's of two kinds."""
_UNITS = "units"
"""Axis of the mesh of devices."""


class JaxRounds(SideBySide):
    """What rounds on JAX share.

    Args:
      shapes: see `SlabRounds`.
      mechanism: see `SlabRounds`.
      together: units side by side on each device.
      steps: of all devices together, in one slab at most.
      smaller: the settings to lower where memory ends.
      seed: see `SlabRounds`.
      devices: `jax.Device`s, each with units of its own. None: all there are.
    """

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

        mesh = Mesh(np.array(devices or all_devices()), (_UNITS,))
        super().__init__(
            shapes,
            mechanism,
            slab_units=steps * together * mesh.size,
            seed=seed,
            worker_count=mesh.size,
        )
        self._together, self._smaller = together, smaller
        spread, whole = Spec(_UNITS), Spec()
        self._everywhere = NamedSharding(mesh, whole)
        self._add = jax.jit(
            jax.shard_map(
                self._step,
                mesh=mesh,
                in_specs=(whole, whole, spread, whole),
                out_specs=(whole, spread),
            ),
            donate_argnums=0,
        )

    @abstractmethod
    def _records(self, broadcast: Any, units: Any, clip: Any) -> tuple[Any, Any]:
        """Updates `[together, dim]` and their `STATISTICS`, float32, on one device."""

    def _pack(self, units: Sequence[ClientExamples], round_index: int) -> Slab:
        return [self._share(units, round_index, self._together * self.worker_count)]

    def _steps(self, share: Any) -> Iterator[tuple[Any, int]]:
        """Units for each device, the real ones counted, and how many are real in all."""
        size = self._together
        all_devices = size * self.worker_count
        for start in range(0, len(share[0]), all_devices):
            real = min(all_devices, int(share.count) - start)
            counts = np.clip(real - size * np.arange(self.worker_count), 0, size)
            parts = [part[start : start + all_devices] for part in share[:-1]]
            yield share._make([*parts, counts.astype(np.int32)]), real

    def _sums(self, weights: Float32[np.ndarray, " dim"], slabs: Iterable[Slab]) -> RoundSums:
        import jax

        clip = self.mechanism.sample_params()
        statistics = [np.zeros((0, len(STATISTICS)), np.float32)]
        running: list[tuple[Any, int]] = []
        with self._exact_numbers():
            # Placed as the function returns them, or the second step would be compiled again.
            broadcast = jax.device_put(self._split(weights), self._everywhere)
            sums = self._empty()
            for (share,) in slabs:
                for step, real in self._steps(share):
                    sums, rows = self._add(sums, broadcast, step, clip)
                    running.append((rows, real))
                    if len(running) > 1:  # the next step is on its way; more would take memory
                        statistics.append(_rows(*running.pop(0)))
            statistics += [_rows(*step) for step in running]
            return RoundSums(tuple(map(np.asarray, sums)), np.concatenate(statistics))

    def _empty(self) -> Any:
        """Sums of nothing, on every device."""
        import jax

        return jax.device_put(self.mechanism.initial_sample_state(self.dim), self._everywhere)

    def _sums_by_worker(
        self, weights: np.ndarray, units: Sequence[ClientExamples]
    ) -> list[np.ndarray]:
        import jax

        size, workers = self._together, self.worker_count
        share, clip = self._share(units, 0, size), self.mechanism.sample_params()
        found = []
        with self._exact_numbers():
            broadcast = jax.device_put(self._split(weights), self._everywhere)
            for worker in range(workers):
                sums = self._empty()
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
                    sums, _ = self._add(sums, broadcast, share._make([*parts, counts]), clip)
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
        real = jnp.arange(self._together) < units.count[0]

        def added(total: Any, part: Any) -> Any:
            # What fills the places adds nothing, whatever its record is.
            mine = jnp.where(real.reshape((-1,) + (1,) * (part.ndim - 1)), part, 0)
            return total + jax.lax.psum(jnp.sum(mine, axis=0), _UNITS)

        return tuple(map(added, sums, records)), rows

    @contextmanager
    def _exact_numbers(self) -> Iterator[None]:
        """Lets the clip and the sum have 64 bits; where memory ends, one sentence.

        Raises:
          ConfigError: the device has too little memory.
        """
        import jax

        try:
            with exact_numbers():
                yield
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            raise ConfigError(
                f"the device has too little memory for one step; lower {self._smaller}"
            ) from error


def on_each_device(tree: Any) -> Any:
    """The same values, as each device's own: inside a step they may then differ."""
    import jax

    return jax.tree.map(lambda leaf: jax.lax.pcast(leaf, _UNITS, to="varying"), tree)


def all_devices() -> list[Any]:
    """Devices that JAX finds in this process.

    Raises:
      ConfigError: the machine lends an accelerator and JAX does not see it.
    """
    import jax

    devices = jax.devices()
    lent = [name for name in ACCELERATOR_FILES if Path(name).exists()]
    if lent and devices[0].platform == "cpu":
        raise ConfigError(
            f"there is an accelerator ({lent[0]}) and JAX finds none but the processor; install "
            "jaxlib for it and a driver that fits, or set training.backend: tensorflow"
        )
    return devices


def _rows(rows: Any, real: int) -> np.ndarray:
    return np.asarray(rows)[:real]
