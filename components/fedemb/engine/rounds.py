"""Training rounds on TensorFlow: virtual clients in parallel, exact sums of clipped updates.

One traced function has one loop per worker, on a core or an accelerator. A loop trains its virtual
clients sequentially in the worker's variables and adds their updates to its int64 sum. Integer sums
do not depend on order, so any assignment of clients to workers, devices and slabs gives the same
bits. Slabs of bounded size keep memory independent of the number of clients and identities.
"""

# TensorFlow, Keras, JAX and SciPy are not fully typed; the project's own signatures are checked.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false
# pyright: reportUnknownParameterType=false

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Generic, NamedTuple, NewType, TypeVar

import numpy as np
from jaxtyping import Float32
from typing_extensions import override

from fedemb.config import LocalTrainingConfig
from fedemb.engine.clients.client_draws import LocalData, glorot_head, local_data, no_data
from fedemb.engine.clients.local_training import Worker, train_client
from fedemb.engine.clients.objective import Objective
from fedemb.engine.gradient_sums import gradients_summed_in_order
from fedemb.engine.server import MeanStep, ServerRule
from fedemb.models.arrays import Model, Part, TfTensor, Variable
from fedemb.privacy.queries import Array, Mechanism, Parameters, Record

SLAB_BYTES = 64 << 20
"""Maximum bytes of images in one slab; a larger client has a separate slab."""
SLAB_CLIENTS_PER_WORKER = 16
STATISTICS = ("norm", "first_loss", "last_loss", "examples")
"""Columns of `RoundSums.clients`."""


def _specs(tree: Array | tuple[Array, ...]) -> object:
    import tensorflow as tf

    return tf.nest.map_structure(lambda t: tf.TensorSpec(np.shape(t), tf.as_dtype(t.dtype)), tree)


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


@dataclass(frozen=True)
class RoundSums:
    """Un-noised result of a round. Raw: only for the mechanism and private diagnostics."""

    sample_state: Record
    """Input of `Mechanism.aggregate`."""
    clients: np.ndarray
    """float32 `[clients, 4]`, columns `STATISTICS`; for the private diagnostics."""


class Share(NamedTuple, Generic[Part]):
    """Virtual clients of a slab for one worker, packed without padding. Raw."""

    data: LocalData[Part]
    """Data of all clients, concatenated."""
    offsets: Part
    """int32 `[clients + 1]`: client i has images and rows offsets[i]:offsets[i+1]."""
    heads: Part
    """int32 `[clients + 1]`: client i has rows heads[i]:heads[i+1] of the heads."""


Slab = NewType("Slab", object)
"""Part of the units of a round, in a form that only the rounds that packed them read."""
ShareT = TypeVar("ShareT")
"""Units of a slab for one worker."""


def seed_of(seed: int, round_index: int, grouping: int, group: int) -> np.random.SeedSequence:
    """Returns the seed of one virtual client or unit in one round; depends on nothing else."""
    return np.random.SeedSequence([seed, round_index, grouping, group])


def pack(
    clients: Sequence[LocalData[np.ndarray]], empty: LocalData[np.ndarray]
) -> Share[np.ndarray]:
    """Concatenates clients; `empty` has the shapes and no examples."""

    def starts(part: str) -> np.ndarray:
        return np.cumsum([0, *(len(getattr(c, part)) for c in clients)], dtype=np.int32)

    parts = zip(empty, *clients, strict=True)
    return Share(LocalData._make(map(np.concatenate, parts)), starts("rows"), starts("head"))


def assign_weights(variables: Sequence[Variable], weights: Float32[np.ndarray, " dim"]) -> None:
    """Writes flat weights into Keras variables, in order; drops the rest (a head)."""
    start = 0
    for variable in variables:
        shape = tuple(variable.shape)
        stop = start + int(np.prod(shape))
        variable.assign(weights[start:stop].reshape(shape))
        start = stop


class SlabRounds(ABC):
    """Base class of rounds on any backend: slabs of bounded size, one exact sum.

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
        self.mechanism, self.seed, self.worker_count = mechanism, seed, worker_count
        self.seconds_waited = 0.0
        """Seconds that the last round waited for data."""
        self._slab_units = slab_units
        self._shapes = list(shapes)
        self._sizes = [int(np.prod(shape)) for shape in shapes]
        self.dim = sum(self._sizes)

    @abstractmethod
    def initial_weights(self) -> Float32[np.ndarray, " dim"]:
        """Returns the values of the trained variables, float32 `[dim]`."""

    @abstractmethod
    def _pack(self, units: Sequence[ClientExamples], round_index: int) -> Slab:
        """Packs at least one unit, with a share for each worker."""

    @abstractmethod
    def _sums(
        self, weights: Float32[np.ndarray, " dim"], slabs: Iterable[Slab], parameters: Parameters
    ) -> RoundSums:
        """Returns the clipped sum over packed slabs."""

    @property
    def advance(self) -> ServerRule:
        """Server step on the noised mean."""
        plan = self.mechanism.plan
        return MeanStep(plan.rounds, plan.l2_norm_clip)

    def _split(self, weights: np.ndarray) -> list[np.ndarray]:
        parts = np.split(weights, np.cumsum(self._sizes)[:-1])
        return [part.reshape(shape) for part, shape in zip(parts, self._shapes, strict=True)]

    def slabs(self, units: Iterable[ClientExamples], round_index: int) -> Iterator[Slab]:
        """Packs the units of a round into slabs of bounded size; empty units contribute zero."""
        waiting: list[ClientExamples] = []
        size = 0
        alone = self.mechanism.plan.samples_units
        for number, sampled in enumerate(units):
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

    def __call__(
        self,
        weights: Float32[np.ndarray, " dim"],
        clients: Iterable[ClientExamples],
        round_index: int,
    ) -> RoundSums:
        """Computes the clipped sum of one round, with the clip of the round's own mechanism.

        Args:
          weights: float32 `[dim]`, initial weights of all clients.
          clients: the sampled virtual clients.
          round_index: number of the round, part of the seeds.
        """
        parameters = self.mechanism.clip
        return self.run(weights, self.slabs(clients, round_index), parameters)

    def run(
        self, weights: Float32[np.ndarray, " dim"], slabs: Iterable[Slab], parameters: Parameters
    ) -> RoundSums:
        """Computes the clipped sum of one round from packed slabs.

        Args:
          weights: float32 `[dim]`, initial weights of all clients.
          slabs: packed units of the round, from `slabs`.
          parameters: `Mechanism.clip` of the mechanism that noises the sum.

        Raises:
          StorageError: a host of the job was lost.
        """
        return self._sums(weights, self._timed(slabs), parameters)

    def _timed(self, slabs: Iterable[Slab]) -> Iterator[Slab]:
        """Yields the slabs and measures the time spent waiting for them."""
        self.seconds_waited, asked = 0.0, time.perf_counter()
        for slab in slabs:
            self.seconds_waited += time.perf_counter() - asked
            yield slab
            asked = time.perf_counter()


class ParallelRounds(SlabRounds, Generic[ShareT]):
    """Rounds on TensorFlow: one traced function, with a loop for each worker.

    Args:
      shapes: see `SlabRounds`.
      mechanism: see `SlabRounds`.
      share: `tf.TensorSpec`s of a worker's share of a slab.
      slab_units: see `SlabRounds`.
      seed: see `SlabRounds`.
      devices: one device name for each worker; None lets TensorFlow decide.
    """

    def __init__(
        self,
        shapes: Sequence[tuple[int, ...]],
        mechanism: Mechanism,
        share: object,
        *,
        slab_units: int,
        seed: int,
        devices: Sequence[str | None],
    ) -> None:
        import tensorflow as tf

        super().__init__(
            shapes, mechanism, slab_units=slab_units, seed=seed, worker_count=len(devices)
        )
        self._devices = devices
        self._train = tf.function(
            self._train_slab,
            input_signature=[
                [tf.TensorSpec(shape, tf.float32) for shape in shapes],
                [share] * self.worker_count,
                [_specs(mechanism.initial_sample_state(self.dim))] * self.worker_count,
                _specs(mechanism.clip),
            ],
            autograph=False,  # not needed, and a third of tracing time
        )

    @abstractmethod
    def _loop(
        self,
        number: int,
        broadcast: Sequence[TfTensor],
        share: ShareT,
        *,
        state: Record,
        parameters: Parameters,
    ) -> tuple[Record, TfTensor]:
        """Adds the records of one worker's units to its sum; also returns their `STATISTICS`."""

    def _sums(
        self, weights: Float32[np.ndarray, " dim"], slabs: Iterable[Slab], parameters: Parameters
    ) -> RoundSums:
        import tensorflow as tf

        broadcast = [tf.constant(part) for part in self._split(weights)]
        query = self.mechanism.query
        states = [self.mechanism.initial_sample_state(self.dim) for _ in self._devices]
        statistics = [np.zeros((0, len(STATISTICS)), np.float32)]
        for slab in slabs:
            # The clip is an argument of the traced function, because it may change.
            states, rows = self._train(broadcast, slab, states, parameters)
            statistics.append(rows.numpy())
        total = states[0]
        for state in states[1:]:
            total = query.merge_sample_states(total, state)
        return RoundSums(total, np.concatenate(statistics))

    def _train_slab(
        self,
        broadcast: Sequence[TfTensor],
        slab: Sequence[ShareT],
        states: Sequence[Record],
        parameters: Parameters,
    ) -> tuple[list[Record], TfTensor]:
        import tensorflow as tf

        done, statistics = [], []
        for number, (device, share) in enumerate(zip(self._devices, slab, strict=True)):
            with tf.device(device), gradients_summed_in_order():
                summed, rows = self._loop(
                    number, broadcast, share, state=states[number], parameters=parameters
                )
            done.append(summed)
            statistics.append(rows)
        return done, tf.concat(statistics, axis=0)


def assigned_devices(devices: Sequence[str] | None, workers: int) -> list[str | None]:
    """Returns a device for each worker, in turn; None lets TensorFlow decide."""
    return [devices[number % len(devices)] if devices else None for number in range(workers)]


class ClientRounds(SlabRounds):
    """Base class of rounds of virtual clients that train locally, on any backend."""

    def _set_model(
        self,
        backbone: Model,
        config: LocalTrainingConfig,
        variables: Sequence[Variable] | None,
        shared_head_rows: int,
    ) -> list[tuple[int, ...]]:
        """Sets the trained model; returns the shapes of its trained tensors."""
        chosen = list(backbone.trainable_variables if variables is None else variables)
        self.objective = Objective(backbone, chosen, config, shared_head_rows)
        self._image = tuple(int(n) for n in backbone.input_shape[1:])
        return self.objective.shapes

    def initial_weights(self) -> Float32[np.ndarray, " dim"]:
        """Returns the values of the trained variables, float32 `[dim]`; a shared head is random."""
        parts = [v.numpy().ravel() for v in self.objective.variables]
        if self.objective.shared_head_rows:
            random = np.random.default_rng(np.random.SeedSequence([self.seed]))
            rows, dim = self._shapes[-1]
            parts.append(glorot_head(rows, dim, random).ravel())
        return np.concatenate(parts).astype(np.float32)

    def _data(self, client: ClientExamples, round_index: int) -> LocalData[np.ndarray]:
        return local_data(
            client.images,
            client.labels,
            self.objective.config,
            seed=seed_of(self.seed, round_index, client.grouping, client.group),
            dim=self.objective.dim,
            shared_head=bool(self.objective.shared_head_rows),
        )


class RoundFunction(ClientRounds, ParallelRounds["Share[TfTensor]"]):
    """Trains the virtual clients of a round and sums their updates through a mechanism.

    Args:
      backbone: `keras.Model` from `build_backbone` or `cut`; not changed by rounds.
      mechanism: its query clips and rounds each update.
      config: local training.
      variables: trained variables of the backbone; all trainable variables by default.
      seed: seed of shuffles, augmentation and heads; never of noise or sampling.
      workers: virtual clients trained in parallel; best one per core with one intra-op thread
        (`configure_threads`), or one per device.
      devices: device names, assigned to workers in turn. None lets TensorFlow decide.
      shared_head_rows: DP-FedAvg, see `Objective`.
    """

    def __init__(
        self,
        backbone: Model,
        mechanism: Mechanism,
        config: LocalTrainingConfig,
        *,
        variables: Sequence[Variable] | None = None,
        seed: int = 0,
        workers: int = 1,
        devices: Sequence[str] | None = None,
        shared_head_rows: int = 0,
    ) -> None:
        import tensorflow as tf

        shapes = self._set_model(backbone, config, variables, shared_head_rows)
        self._workers = []
        for index, device in enumerate(assigned_devices(devices, workers)):
            with tf.device(device):
                self._workers.append(Worker(self.objective, index))
        self._no_client = no_data(config, self._image, self.objective.dim)
        any_length = LocalData._make(
            tf.TensorSpec([None, *part.shape[1:]], part.dtype) for part in self._no_client
        )
        super().__init__(
            shapes,
            mechanism,
            Share(any_length, *[tf.TensorSpec([None], tf.int32)] * 2),
            slab_units=SLAB_CLIENTS_PER_WORKER * workers,
            seed=seed,
            devices=assigned_devices(devices, workers),
        )

    def _pack(self, units: Sequence[ClientExamples], round_index: int) -> Slab:
        """Assigns clients to workers in the order of their coins.

        The assignment ignores sizes. Otherwise one user could move others to a worker whose floats
        differ.
        """
        shares: list[list[LocalData[np.ndarray]]] = [[] for _ in range(self.worker_count)]
        for unit in units:
            worker = unit.worker_key % self.worker_count
            shares[worker].append(self._data(unit, round_index))
        return Slab([pack(share, self._no_client) for share in shares])

    @override
    def _loop(
        self,
        number: int,
        broadcast: Sequence[TfTensor],
        share: Share[TfTensor],
        *,
        state: Record,
        parameters: Parameters,
    ) -> tuple[Record, TfTensor]:
        """Trains the clients of one worker sequentially."""
        import tensorflow as tf

        query, worker = self.mechanism.query, self._workers[number]
        objective = self.objective.on_this_device()
        epochs = objective.config.epochs

        def body(
            index: TfTensor, state: Record, rows: tf.TensorArray
        ) -> tuple[TfTensor, Record, tf.TensorArray]:
            start, stop = share.offsets[index], share.offsets[index + 1]
            data = LocalData(
                images=share.data.images[start:stop],
                rows=share.data.rows[start:stop],
                order=share.data.order[epochs * start : epochs * stop],
                draws=share.data.draws[epochs * start : epochs * stop],
                head=share.data.head[share.heads[index] : share.heads[index + 1]],
            )
            update, losses = train_client(objective, worker, broadcast, data)
            record = query.preprocess_record(parameters, update)
            state = query.accumulate_preprocessed_record(state, record)
            norm = tf.sqrt(tf.reduce_sum([tf.reduce_sum(tf.square(part)) for part in update]))
            row = tf.stack([norm, losses[0], losses[1], tf.cast(stop - start, tf.float32)])
            return index + 1, state, rows.write(index, row)

        count = tf.shape(share.offsets)[0] - 1
        rows = tf.TensorArray(tf.float32, size=count, element_shape=[len(STATISTICS)])
        _, state, rows = tf.while_loop(
            lambda index, *_: index < count,
            body,
            (tf.constant(0), state, rows),
            parallel_iterations=1,
        )
        return state, rows.stack()
