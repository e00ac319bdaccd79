"""The round of DP-SGD on JAX: a micro-batch on each device, their integers added up by `psum`.

The same records as `UnitGradientFunction` makes: units side by side under `vmap`, their views
inside, clipped in float64. One compiled function takes one micro-batch for each device, whatever
the size of the round; it is compiled once. Integer sums have no order, so one device and many give
the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32

from fedemb.backend import exact_numbers
from fedemb.config import UnitGradientConfig
from fedemb.embedding.rounds import STATISTICS, ClientExamples, RoundSums, Slab
from fedemb.embedding.unit_gradient import SLAB_MICROBATCHES, UnitRounds, UnitShare
from fedemb.errors import ConfigError

ACCELERATOR_FILES = ("/dev/nvidia0", "/dev/accel0", "/dev/vfio/0")
"""What a container sees of an accelerator it was given: NVIDIA's, and Google's of two kinds."""
_UNITS = "units"
"""Axis of the mesh of devices."""


class JaxUnitGradientFunction(UnitRounds):
    """Sums the clipped mean gradients of the units of a round, on JAX.

    Args:
      classifier: `keras.Model` of `build_classifier`; not changed by rounds.
      mechanism: `privacy.queries.Mechanism`; clips and rounds each record.
      config: micro-batches, views, automatic clip.
      variables: variables that train.
      seed: of the views. Never of noise or sampling.
      devices: `jax.Device`s, each with a micro-batch of its own. None: all there are.
    """

    def __init__(
        self,
        classifier: Any,
        mechanism: Any,
        config: UnitGradientConfig,
        *,
        variables: Sequence[Any],
        seed: int = 0,
        devices: Sequence[Any] | None = None,
    ) -> None:
        import jax
        from jax.sharding import Mesh, NamedSharding
        from jax.sharding import PartitionSpec as Spec

        shapes = self._hold(classifier, config, variables)
        mesh = Mesh(np.array(devices or all_devices()), (_UNITS,))
        super().__init__(
            shapes,
            mechanism,
            slab_units=SLAB_MICROBATCHES * config.microbatch * mesh.size,
            seed=seed,
            worker_count=mesh.size,
        )
        spread, whole = Spec(_UNITS), Spec()
        self._everywhere = NamedSharding(mesh, whole)
        self._add = jax.jit(
            jax.shard_map(
                self._microbatch,
                mesh=mesh,
                in_specs=(whole, whole, spread, whole),
                out_specs=(whole, spread),
            ),
            donate_argnums=0,
        )

    def _pack(self, units: Sequence[ClientExamples], round_index: int) -> Slab:
        return [self._share(units, round_index, self._config.microbatch * self.worker_count)]

    def _steps(self, share: UnitShare) -> Iterator[tuple[UnitShare, int]]:
        """A micro-batch for each device, its real units counted, and how many are real in all."""
        size = self._config.microbatch
        together = size * self.worker_count
        for start in range(0, len(share.labels), together):
            real = min(together, int(share.count) - start)
            counts = np.clip(real - size * np.arange(self.worker_count), 0, size)
            parts = [part[start : start + together] for part in share[:4]]
            yield UnitShare(*parts, count=counts.astype(np.int32)), real

    def _sums(self, weights: Float32[np.ndarray, " dim"], slabs: Iterable[Slab]) -> RoundSums:
        import jax

        clip = self.mechanism.sample_params()
        statistics = [np.zeros((0, len(STATISTICS)), np.float32)]
        running: list[tuple[Any, int]] = []
        with _exact():
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

        size, workers = self._config.microbatch, self.worker_count
        share, clip = self._share(units, 0), self.mechanism.sample_params()
        found = []
        with _exact():
            broadcast = jax.device_put(self._split(weights), self._everywhere)
            for worker in range(workers):
                sums = self._empty()
                for start in range(0, len(share.labels), size):
                    # Other devices hold others at each place, none of them to be counted.
                    parts = [
                        np.concatenate(
                            [
                                np.roll(part[start : start + size], other != worker, 0)
                                for other in range(workers)
                            ]
                        )
                        for part in share[:4]
                    ]
                    counts = np.zeros(workers, np.int32)
                    counts[worker] = min(size, int(share.count) - start)
                    step = UnitShare(*parts, count=counts)
                    sums, _ = self._add(sums, broadcast, step, clip)
                found.append(np.concatenate([np.ravel(part) for part in sums]))
        return found

    def _microbatch(self, sums: Any, broadcast: Any, units: UnitShare, clip: Any) -> Any:
        """Adds the records of a micro-batch on each device; also returns their `STATISTICS`."""
        import jax
        import jax.numpy as jnp

        views = self._views(units)
        # Each device derives by weights of its own: by shared ones JAX would add up the gradients
        # of all devices, before any clip.
        own = jax.lax.pcast(broadcast, _UNITS, to="varying")
        updates, losses = jax.vmap(partial(self._record, own))(views, units.labels, units.weights)
        norms = jnp.sqrt(jnp.sum(jnp.square(updates.astype("float64")), axis=1))
        if self._config.automatic_clip is not None:
            updates = jax.vmap(self._automatic, (0, 0, None))(updates, norms, clip)
        records = jax.vmap(lambda update: self.mechanism.record(clip, [update]))(updates)
        real = jnp.arange(self._config.microbatch) < units.count[0]

        def added(total: Any, part: Any) -> Any:
            # What fills the micro-batch adds nothing, whatever its record is.
            mine = jnp.where(real.reshape((-1,) + (1,) * (part.ndim - 1)), part, 0)
            return total + jax.lax.psum(jnp.sum(mine, axis=0), _UNITS)

        images = jnp.count_nonzero(units.weights, axis=1)
        rows = jnp.stack([norms, losses, losses, images], axis=1).astype("float32")
        return tuple(map(added, sums, records)), rows

    def _record(self, broadcast: Any, images: Any, labels: Any, weights: Any) -> tuple[Any, Any]:
        """Downhill mean gradient of a unit, float32 `[dim]`, and its loss."""
        import jax
        import jax.numpy as jnp

        views = self._config.views
        labels = jnp.repeat(labels, views)
        weights = jnp.repeat(weights / float(views), views)

        def loss(trained: Any) -> Any:
            chances = jax.nn.log_softmax(self._logits(trained, images))
            return -jnp.sum(weights * jnp.take_along_axis(chances, labels[:, None], 1)[:, 0])

        value, gradients = jax.value_and_grad(loss)(broadcast)
        return jnp.concatenate([-jnp.ravel(part) for part in gradients]), value


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


@contextmanager
def _exact() -> Iterator[None]:
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
            "the device has too little memory for one micro-batch; lower "
            "training.unit_gradient.microbatch, views or images_per_unit"
        ) from error
