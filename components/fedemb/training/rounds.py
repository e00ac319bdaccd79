"""Rounds on any backend: units in slabs of bounded size, one exact sum, and the loop over rounds.

sample, load -> local training or gradient -> clip, exact sum -> noise -> commit -> server step

Integer sums do not depend on order, so any assignment of units to workers, devices and slabs gives
the same bits. Slabs of bounded size keep memory independent of the number of clients.
"""

# The numeric libraries are not fully typed; the project's own signatures are checked.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false
# pyright: reportUnknownParameterType=false

from __future__ import annotations

import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Generic, NewType, Protocol, Self, TypeVar, cast, overload

import numpy as np
from jaxtyping import Float32

from fedemb.config import ServerConfig
from fedemb.errors import Refused
from fedemb.models.keras_backend import Variable
from fedemb.privacy.running import Array, Mechanism, RoundOutput
from fedemb.privacy.sampling import Index, VirtualClient
from fedemb.training.server import ServerState, server_step

SLAB_BYTES = 64 << 20
"""Maximum bytes of images in one slab; a larger client has a separate slab."""
STATISTICS = ("norm", "first_loss", "last_loss", "examples")
"""Columns of `RoundSums.clients`."""
_AHEAD = 2
"""Maximum number of waiting slabs; with the maximum slab size, this limits memory."""
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
"""Record of a committed round."""
Part_co = TypeVar("Part_co", covariant=True)
Slab = NewType("Slab", object)
"""Part of the units of a round, in a form that only the rounds that packed them read."""


@dataclass(frozen=True)
class ClientExamples:
    """Examples of one virtual client. Raw."""

    grouping: int
    group: int
    images: np.ndarray
    """uint8 `[examples, size, size, channels]`; or float32 `[examples, features]` of a frozen trunk
    (`FrozenFeatures`)."""
    labels: np.ndarray
    """int64 `[examples]`, any values that are consistent inside the client."""
    worker_key: int = 0
    """Selects the worker: the client's index among all sampled clients of the round, including
    empty ones; for units sampled independently, their keyed hash."""


UnitFeatures = np.ndarray
"""Features of one unit, a row for each image, see `feature_cache`. Raw."""
Unit = ClientExamples | UnitFeatures
"""Examples or features of one virtual client or unit."""


@dataclass(frozen=True)
class RoundSums:
    """Un-noised result of a round. Raw: only for the mechanism and private diagnostics."""

    total: Array
    """Sum of the records, int64 `[dim]`: input of `Mechanism.aggregate`."""
    clients: np.ndarray
    """float32 `[clients, 4]`, columns `STATISTICS`; for the private diagnostics."""


def seed_of(seed: int, round_index: int, grouping: int, group: int) -> np.random.SeedSequence:
    """Returns the seed of one virtual client or unit in one round; depends on nothing else."""
    return np.random.SeedSequence([seed, round_index, grouping, group])


def assign_weights(variables: Sequence[Variable], weights: Float32[np.ndarray, " dim"]) -> None:
    """Writes flat weights into Keras variables, in order; drops the rest (a head)."""
    start = 0
    for variable in variables:
        shape = tuple(variable.shape)
        stop = start + int(np.prod(shape))
        variable.assign(weights[start:stop].reshape(shape))
        start = stop


class TrainingRound(ABC):
    """Base class of every kind of round: takes units and returns their clipped integer sum.

    Args:
      mechanism: clips and sums; may have no keys, unlike the mechanism that adds noise.
      dim: number of entries of a record.
    """

    seconds_waited = 0.0
    """Seconds that the last round waited for data."""
    variables: Sequence[Variable] = ()
    """Trained variables."""

    def __init__(self, mechanism: Mechanism, dim: int) -> None:
        self.mechanism, self.dim = mechanism, dim

    def advance(
        self, server: ServerConfig, state: ServerState, mean: Float32[np.ndarray, " dim"]
    ) -> ServerState:
        """Returns the server state after a noised mean.

        Only public numbers are used: applying it again verifies that the mean trained the model.
        """
        plan = self.mechanism.plan
        return server_step(server, state, mean, rounds=plan.rounds, l2_norm_clip=plan.l2_norm_clip)

    def initial_weights(self) -> Float32[np.ndarray, " weights"]:
        """Returns the values of the trained variables, float32 `[weights]`."""
        return np.concatenate([v.numpy().ravel() for v in self.variables]).astype(np.float32)

    @abstractmethod
    def slabs(self, units: Iterable[Unit], round_index: int) -> Iterator[Slab]:
        """Packs the units of a round, some at a time; units without images contribute nothing."""

    @abstractmethod
    def _sums(self, weights: Float32[np.ndarray, " weights"], slabs: Iterable[Slab]) -> RoundSums:
        """Returns the clipped sum over packed slabs."""

    def __call__(
        self, weights: Float32[np.ndarray, " weights"], units: Iterable[Unit], round_index: int
    ) -> RoundSums:
        """Packs the units of one round and computes their clipped sum; see `run`.

        Args:
          weights: float32 `[weights]`, initial weights of all units.
          units: the sampled virtual clients or units.
          round_index: number of the round, part of the seeds.
        """
        return self.run(weights, self.slabs(units, round_index))

    def run(self, weights: Float32[np.ndarray, " weights"], slabs: Iterable[Slab]) -> RoundSums:
        """Computes the clipped sum of one round from packed slabs.

        Args:
          weights: float32 `[weights]`, initial weights of all units.
          slabs: packed units of the round, from `slabs`.

        Raises:
          StorageError: a host of the job was lost.
        """
        return self._sums(weights, self._timed(slabs))

    def _timed(self, slabs: Iterable[Slab]) -> Iterator[Slab]:
        """Yields the slabs and measures the time spent waiting for them."""
        self.seconds_waited, asked = 0.0, time.perf_counter()
        for slab in slabs:
            self.seconds_waited += time.perf_counter() - asked
            yield slab
            asked = time.perf_counter()


class SlabRounds(TrainingRound):
    """Base class of rounds of examples on any backend: slabs of bounded size.

    Args:
      shapes: shapes of the trained tensors.
      mechanism: clips and rounds each record.
      slab_units: maximum number of units in one slab.
      seed: seed of all random draws except noise and sampling.
      worker_count: number of parallel workers.
    """

    def __init__(
        self,
        shapes: Sequence[tuple[int, ...]],
        mechanism: Mechanism,
        *,
        slab_units: int,
        seed: int,
        worker_count: int,
    ) -> None:
        self._shapes = list(shapes)
        self._sizes = [int(np.prod(shape)) for shape in shapes]
        super().__init__(mechanism, sum(self._sizes))
        self.seed, self.worker_count, self._slab_units = seed, worker_count, slab_units

    @abstractmethod
    def _pack(self, units: Sequence[ClientExamples], round_index: int) -> Slab:
        """Packs at least one unit, with a share for each worker."""

    def _split(self, weights: np.ndarray) -> list[np.ndarray]:
        parts = np.split(weights, np.cumsum(self._sizes)[:-1])
        return [part.reshape(shape) for part, shape in zip(parts, self._shapes, strict=True)]

    def slabs(self, units: Iterable[Unit], round_index: int) -> Iterator[Slab]:
        """Packs the units of a round into slabs of bounded size; empty units contribute zero."""
        waiting: list[ClientExamples] = []
        size = 0
        alone = self.mechanism.plan.samples_units
        for number, sampled in enumerate(cast("Iterable[ClientExamples]", units)):
            if not len(sampled.labels):
                continue
            # Adding or removing a unit changes later indices, but no keyed hash.
            unit = replace(sampled, worker_key=sampled.group if alone else number)
            full = len(waiting) == self._slab_units or size + unit.images.nbytes > SLAB_BYTES
            if waiting and full:
                yield self._pack(waiting, round_index)
                waiting, size = [], 0
            waiting.append(unit)
            size += unit.images.nbytes
        if waiting:
            yield self._pack(waiting, round_index)


class Padded(Protocol[Part_co]):
    """Named tuple of arrays with a row for each unit, padded to a fixed number of rows."""

    @property
    def real(self) -> Part_co:
        """Last array: number of units, int32; the other rows are padding."""
        ...

    @classmethod
    def _make(cls, iterable: Iterable[object]) -> Self: ...

    def __iter__(self) -> Iterator[Part_co]: ...
    @overload
    def __getitem__(self, key: int, /) -> Part_co: ...
    @overload
    def __getitem__(self, key: slice, /) -> tuple[Part_co, ...]: ...


Units = TypeVar("Units", bound=Padded[np.ndarray])
"""Padded units on the host."""


class VectorizedRounds(SlabRounds, Generic[Units]):
    """Rounds that compute several units in one batch.

    A record must not depend on its position in the batch. If the last elements of a batch are
    computed differently, adding or removing one unit would change the records of others.
    """

    probe_units = 64
    """Minimum number of generated units of the check; about one record in ten is affected."""
    layout = ""
    """Setting of the batch size."""
    _parallel_units: int
    _layout_checked = False

    @abstractmethod
    def _share(self, units: Sequence[ClientExamples], round_index: int, multiple: int) -> Units:
        """Returns units padded to a multiple: see `Padded`."""

    @abstractmethod
    def _generated_unit(self, group: int, random: np.random.Generator) -> ClientExamples:
        """Returns a generated unit that does not depend on data."""

    @abstractmethod
    def _sums_by_worker(
        self, weights: np.ndarray, units: Sequence[ClientExamples]
    ) -> list[np.ndarray]:
        """Returns the integer sums of each worker for the same units."""

    def run(self, weights: Float32[np.ndarray, " dim"], slabs: Iterable[Slab]) -> RoundSums:
        """See `SlabRounds`; calls `rehearse` before the first slab is read."""
        if not self._layout_checked:
            self.rehearse(weights)
        return super().run(weights, slabs)

    def rehearse(self, weights: Float32[np.ndarray, " dim"] | None = None) -> None:
        """Runs `require_exact` once, at the given weights or the initial weights."""
        self.require_exact(self.initial_weights() if weights is None else weights)
        self._layout_checked = True

    def require_exact(self, weights: Float32[np.ndarray, " dim"]) -> None:
        """Checks that the bits of a record do not depend on its position or its batch.

        Computes generated units in order, reversed, and in half batches with padding. All must give
        the same integers on every worker. The weights are perturbed first, because a head of zeros
        has no gradients below it.

        Raises:
          Refused: the integers differ.
        """
        size, random = self._parallel_units, np.random.default_rng(0)
        units = [
            self._generated_unit(group, random)
            for group in range(size * -(-self.probe_units // size))
        ]
        moved = weights + random.normal(0.0, 0.1, len(weights)).astype(np.float32)

        def sums(chosen: Sequence[ClientExamples]) -> list[np.ndarray]:
            return self._sums_by_worker(moved, chosen)

        def differ(expected: list[np.ndarray], found: list[np.ndarray]) -> bool:
            return any(not np.array_equal(one, expected[0]) for one in (*expected, *found))

        few = units[:size]
        halves = zip(sums(few[: size // 2]), sums(few[size // 2 :]), strict=True)
        if differ(sums(units), sums(units[::-1])) or differ(
            sums(few), [one + other for one, other in halves]
        ):
            raise Refused(
                f"Records depend on their position in a batch of {size} on this device, so one "
                f"unit could change the records of others. Set {self.layout} to another size (1 "
                "always works), or use a backbone whose channels are multiples of 16."
            )


class Feed:
    """Slabs of all remaining rounds, produced ahead of time by one thread.

    Args:
      function: packs the virtual clients.
      mechanism: mechanism of the attempt; samples the virtual clients of a round.
      first: number of the first round; the plan sets the last round.
      index: users of each virtual client, a `sampling.Index`.
      load: reads the examples of a `sampling.VirtualClient`.
      prepare: called with all virtual clients of a round before they are loaded; None does nothing.
    """

    def __init__(
        self,
        function: TrainingRound,
        mechanism: Mechanism,
        *,
        first: int,
        index: Index,
        load: Callable[[VirtualClient], Unit],
        prepare: Callable[[Sequence[VirtualClient]], None] | None = None,
    ) -> None:
        self._queue: queue.Queue[Slab | BaseException | None] = queue.Queue(_AHEAD)
        self._stop = threading.Event()

        def work() -> None:
            try:
                for number in range(first, mechanism.plan.rounds):
                    clients = mechanism.sample_clients(number, index)
                    if prepare is not None:
                        prepare(clients)
                    for slab in function.slabs(map(load, clients), number):
                        if not self._put(slab):
                            return
                    if not self._put(None):
                        return
            except BaseException as error:
                self._put(error)

        self._thread = threading.Thread(target=work, name="client-feed", daemon=True)
        self._thread.start()

    def _put(self, item: Slab | BaseException | None) -> bool:
        while not self._stop.is_set():
            try:
                self._queue.put(item, timeout=0.1)
            except queue.Full:
                continue
            return True
        return False

    def next_round(self) -> Iterator[Slab]:
        """Yields the slabs of the next round; raises errors of the thread."""
        while (item := self._queue.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Stops the thread."""
        self._stop.set()
        self._thread.join()


@dataclass(frozen=True)
class Round(Generic[R_co]):
    """One finished round. Raw, except `state` and `record`."""

    index: int
    """Number of the round, from 0."""
    sums: RoundSums
    """Un-noised sums and per-client statistics."""
    record: R_co | None
    """Result of `commit`."""
    state: ServerState
    """Server state after the round. Noised."""
    seconds: dict[str, float]
    """Seconds of `train`, `noise`, `commit` (with server step), and `wait` (part of `train`)."""


def run_rounds(
    function: TrainingRound,
    mechanism: Mechanism,
    server: ServerConfig,
    state: ServerState,
    feed: Feed,
    *,
    commit: Callable[[int, RoundOutput], R] | None = None,
) -> Iterator[Round[R]]:
    """Runs the remaining rounds, one per iteration.

    Args:
      function: computes the clipped sum of a round.
      mechanism: mechanism of the attempt; noises the sum and accounts for it.
      server: configuration of the server step.
      state: server state before the first round to run.
      feed: virtual clients of the same rounds.
      commit: commits a round, from its number and its `RoundOutput`; called before the output is
        used. None keeps no record.
    """
    for index in range(state.rounds, mechanism.plan.rounds):
        start = time.perf_counter()
        sums = function.run(state.weights, feed.next_round())
        trained = time.perf_counter()
        output = mechanism.aggregate(index, sums.total)
        noised = time.perf_counter()
        record = commit(index, output) if commit else None
        state = function.advance(server, state, output.mean)
        seconds = {
            "train": trained - start,
            "noise": noised - trained,
            "commit": time.perf_counter() - noised,
            "wait": function.seconds_waited,
        }
        yield Round(index, sums, record, state, seconds)
