"""Rounds of virtual clients on TensorFlow: in parallel, exact sums of clipped updates.

One traced function has one loop per worker, on a core or an accelerator. A loop trains its virtual
clients sequentially in the worker's variables and adds their updates to its int64 sum.
"""

# The numeric libraries are not fully typed; the project's own signatures are checked.
# pyright: reportMissingTypeStubs=false, reportPrivateUsage=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false
# pyright: reportUnknownMemberType=false, reportUnknownParameterType=false
# pyright: reportUnknownVariableType=false

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar, cast

import numpy as np
from jaxtyping import Float32
from typing_extensions import override

from fedemb.config import LocalTrainingConfig
from fedemb.models.keras_backend import Model, Part, TfTensor, TfVariable, Variable
from fedemb.models.losses import build_loss
from fedemb.privacy.running import Mechanism
from fedemb.training.clients import (
    DRAWS,
    PROTOTYPE_BATCH,
    ClientRounds,
    LocalData,
    Objective,
    augment,
    no_data,
)
from fedemb.training.rounds import STATISTICS, ClientExamples, RoundSums, Slab, SlabRounds

if TYPE_CHECKING:
    import tensorflow as tf

_ANY_ORDER = 2
"""Maximum number of terms whose order does not matter."""


@contextmanager
def gradients_summed_in_order() -> Generator[None]:
    """While entered, `tf.GradientTape` sums gradients in a fixed order."""
    from tensorflow.python import pywrap_tfe
    from tensorflow.python.eager import backprop

    usual = backprop._default_vspace
    pywrap_tfe.TFE_Py_RegisterVSpace(usual._replace(aggregate_fn=_summed))
    try:
        yield
    finally:
        pywrap_tfe.TFE_Py_RegisterVSpace(usual)


def _summed(gradients: Sequence[TfTensor | tf.IndexedSlices]) -> TfTensor:
    import tensorflow as tf
    from tensorflow.python.eager import backprop

    if len(gradients) <= _ANY_ORDER or not all(isinstance(g, tf.Tensor) for g in gradients):
        return cast("TfTensor", backprop._aggregate_grads(gradients))
    total, *rest = cast("Sequence[TfTensor]", gradients)
    while rest:
        term = rest.pop(0)
        # The dependency prevents the graph optimizer from fusing the sums into one `AddN`.
        with tf.control_dependencies(rest[:1]):
            total = total + term
    return total


# Initial heads from class means of a virtual client's embeddings.


# Local training of one virtual client, as a graph of TensorFlow.
#
# Implements DP-FedEmb (arXiv 2211.10844; docs/explanation/method.md#algorithm): new head, local
# steps, difference of the weights. The state of a client is in the variables of its worker and is
# overwritten by the next client; only the update is returned. Fused in-place optimizer kernels
# make a local step as cheap as in a plain loop.
#
# All random draws are made in `clients.py`. Batch shapes depend only on the number of
# examples of the client: the last batch of an epoch is short, never padded.


_State = tuple["tf.Tensor", "tf.Tensor"]
"""Index of the next step, and losses of the first and last epoch, float32 `[2]`."""


class Worker:
    """Variables in which virtual clients train sequentially; one worker per core or device.

    Args:
      objective: trained model and its local configuration.
      index: number of the worker, used in names.
    """

    def __init__(self, objective: Objective, index: int) -> None:
        import tensorflow as tf

        def make(shape: Sequence[int | None], kind: str) -> TfVariable:
            known = [n or 0 for n in shape]
            return tf.Variable(
                tf.zeros(known), shape=shape, trainable=False, name=f"worker{index}_{kind}"
            )

        config = objective.config
        per_weight = int(config.client_momentum > 0)
        body = [tuple(int(n) for n in v.shape) for v in objective.variables]
        head = (objective.shared_head_rows or None, objective.dim)
        self.weights = [make(shape, "weight") for shape in body]
        self.head = make(head, "head")
        self.slots = [[make(shape, "slot") for _ in range(per_weight)] for shape in [*body, head]]

    def start(self, values: Sequence[TfTensor]) -> None:
        """Overwrites the state of the last client; `values` are weights, then the head."""
        import tensorflow as tf

        for variable, value, slots in zip(
            [*self.weights, self.head], values, self.slots, strict=True
        ):
            variable.assign(value)
            for slot in slots:
                slot.assign(tf.zeros_like(value))


def first_head(
    objective: Objective, broadcast: Sequence[TfTensor], examples: LocalData[TfTensor]
) -> TfTensor:
    """Returns the initial head of a client, one row per label."""
    if objective.config.head_init == "glorot":
        return examples.head
    return _prototypes(objective, broadcast, examples)


def _prototypes(
    objective: Objective, weights: Sequence[TfTensor], examples: LocalData[TfTensor]
) -> TfTensor:
    """Returns normalised class means of a client's own embeddings, one row per label.

    The head is a function of the broadcast backbone and the client's examples, so it does not
    increase the client's sensitivity. Images are embedded in batches, which bounds memory.
    """
    import tensorflow as tf

    labels, dim = examples.rows, objective.dim
    count, classes = tf.shape(labels)[0], tf.shape(examples.head)[0]
    batch_size = max(objective.config.batch_size, PROTOTYPE_BATCH)

    def add(start: TfTensor, total: TfTensor) -> tuple[TfTensor, TfTensor]:
        stop = tf.minimum(start + batch_size, count)
        found = objective.embeddings(weights, examples.images[start:stop])
        unit = tf.math.l2_normalize(found, axis=1)
        # A product, not a scatter, because the order of its additions is fixed.
        member = tf.one_hot(labels[start:stop], classes, axis=0, dtype=tf.float32)
        return stop, total + tf.matmul(member, unit)

    _, total = tf.while_loop(
        lambda start, _: start < count,
        add,
        (tf.constant(0), tf.zeros([classes, dim])),
        shape_invariants=(tf.TensorShape([]), tf.TensorShape([None, dim])),
        parallel_iterations=1,
    )
    return tf.math.l2_normalize(total, axis=1)


class _LocalSteps:
    """The local steps of one virtual client, in the variables of a worker."""

    def __init__(self, objective: Objective, worker: Worker, examples: LocalData[TfTensor]) -> None:
        import tensorflow as tf

        self._objective, self._worker, self._examples = objective, worker, examples
        self._config, self._loss = objective.config, build_loss(objective.config.loss)
        self._count = tf.shape(examples.rows)[0]
        self._per_epoch = -(-self._count // self._config.batch_size)

    def run(self) -> tf.Tensor:
        """Takes all steps; returns the mean loss of the first and last epoch, float32 `[2]`."""
        import tensorflow as tf

        total, state = self._per_epoch * self._config.epochs, (tf.constant(0), tf.zeros([2]))
        return tf.while_loop(
            lambda index, _: index < total, self._step, state, parallel_iterations=1
        )[1]

    def _step(self, index: tf.Tensor, losses: tf.Tensor) -> _State:
        """Takes one step; returns the next index and the losses with the step's share added."""
        import tensorflow as tf

        config, worker = self._config, self._worker
        epoch = index // self._per_epoch
        batch, rows = self._batch(index, epoch)
        weights = [v.read_value() for v in worker.weights]
        head = worker.head.read_value()
        if config.refresh_prototypes and not self._objective.shared_head_rows:
            head = tf.cond(
                tf.equal(tf.math.floormod(index, self._per_epoch), 0),
                lambda: _prototypes(self._objective, weights, self._examples),
                lambda: head,
            )
            worker.head.assign(head)
        learners = [*weights, head]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(learners)
            embeddings = self._objective.embeddings(weights, batch)
            loss = self._loss(embeddings, head, rows)
        gradients = tape.gradient(
            loss, learners, unconnected_gradients=tf.UnconnectedGradients.ZERO
        )
        # After all gradients are computed, so that no weight is copied.
        with tf.control_dependencies(cast("list[TfTensor]", gradients)):
            gradients = [tf.identity(gradient) for gradient in gradients]
        variables = [*worker.weights, worker.head]
        for variable, slots, gradient in zip(variables, worker.slots, gradients, strict=True):
            rate = config.client_learning_rate
            if variable is worker.head:
                rate *= config.head_learning_rate_scale
            if slots:
                tf.raw_ops.ResourceApplyMomentum(
                    var=variable.handle,
                    accum=slots[0].handle,
                    lr=rate,
                    grad=gradient,
                    momentum=config.client_momentum,
                )
            else:
                tf.raw_ops.ResourceApplyGradientDescent(
                    var=variable.handle, alpha=rate, delta=gradient
                )
        share = loss / tf.cast(self._per_epoch, tf.float32)
        first = tf.where(epoch == 0, share, 0.0)
        last = tf.where(epoch == config.epochs - 1, share, 0.0)
        return index + 1, losses + tf.stack([first, last])

    def _batch(self, index: tf.Tensor, epoch: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the augmented images of a step and their rows of the head."""
        import tensorflow as tf

        config, examples, count = self._config, self._examples, self._count
        offset = (index - epoch * self._per_epoch) * config.batch_size
        size = tf.minimum(config.batch_size, count - offset)
        visits = slice(epoch * count + offset, epoch * count + offset + size)
        chosen = examples.order[visits]
        batch, rows = tf.gather(examples.images, chosen), tf.gather(examples.rows, chosen)
        if config.augmentation is None:
            return batch, rows
        draws = tf.transpose(tf.reshape(examples.draws[visits], [-1, DRAWS]))
        return augment(batch, config.augmentation, lambda _: draws), rows


def train_client(
    objective: Objective,
    worker: Worker,
    broadcast: Sequence[tf.Tensor],
    examples: LocalData[TfTensor],
) -> tuple[list[tf.Tensor], tf.Tensor]:
    """Trains one virtual client and returns its update.

    Args:
      objective: backbone, trained variables, local configuration.
      worker: variables to train in.
      broadcast: float32 tensors of `objective.shapes`, initial weights of all clients.
      examples: examples of the virtual client.

    Returns:
      The update, trained minus broadcast, float32 tensors of `objective.shapes`; and float32 `[2]`:
      mean loss of the first and of the last epoch. The update is neither clipped nor checked for
      finite values: the mechanism does both.
    """
    starts = list(broadcast)
    head = starts.pop() if objective.shared_head_rows else first_head(objective, starts, examples)
    worker.start([*starts, head])
    losses = _LocalSteps(objective, worker, examples).run()
    ends = [v.read_value() for v in worker.weights]
    if objective.shared_head_rows:
        starts, ends = [*starts, head], [*ends, worker.head.read_value()]
    return [end - start for end, start in zip(ends, starts, strict=True)], losses


# Training rounds on TensorFlow: virtual clients in parallel, exact sums of clipped updates.
#
# One traced function has one loop per worker, on a core or an accelerator. A loop trains its
# virtual clients sequentially in the worker's variables and adds their updates to its int64 sum.
# Integer sums do not depend on order, so any assignment of clients to workers, devices and slabs
# gives the same bits. Slabs of bounded size keep memory independent of the number of clients and
# identities.


SLAB_CLIENTS_PER_WORKER = 16


class Share(NamedTuple, Generic[Part]):
    """Virtual clients of a slab for one worker, packed without padding. Raw."""

    data: LocalData[Part]
    """Data of all clients, concatenated."""
    offsets: Part
    """int32 `[clients + 1]`: client i has images and rows offsets[i]:offsets[i+1]."""
    heads: Part
    """int32 `[clients + 1]`: client i has rows heads[i]:heads[i+1] of the heads."""


ShareT = TypeVar("ShareT")
"""Units of a slab for one worker."""


def pack(
    clients: Sequence[LocalData[np.ndarray]], empty: LocalData[np.ndarray]
) -> Share[np.ndarray]:
    """Concatenates clients; `empty` has the shapes and no examples."""

    def starts(part: str) -> np.ndarray:
        return np.cumsum([0, *(len(getattr(c, part)) for c in clients)], dtype=np.int32)

    parts = zip(empty, *clients, strict=True)
    return Share(LocalData._make(map(np.concatenate, parts)), starts("rows"), starts("head"))


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
                [tf.TensorSpec([self.dim], tf.int64)] * self.worker_count,
            ],
            autograph=False,  # not needed, and a third of tracing time
        )

    @abstractmethod
    def _loop(
        self, number: int, broadcast: Sequence[TfTensor], share: ShareT, state: TfTensor
    ) -> tuple[TfTensor, TfTensor]:
        """Adds the records of one worker's units to its sum; also returns their `STATISTICS`."""

    def _sums(self, weights: Float32[np.ndarray, " dim"], slabs: Iterable[Slab]) -> RoundSums:
        import tensorflow as tf

        broadcast = [tf.constant(part) for part in self._split(weights)]
        states = [np.zeros(self.dim, np.int64) for _ in self._devices]
        statistics = [np.zeros((0, len(STATISTICS)), np.float32)]
        for slab in slabs:
            states, rows = self._train(broadcast, slab, states)
            statistics.append(rows.numpy())
        total = np.sum([np.asarray(state) for state in states], axis=0)
        return RoundSums(total, np.concatenate(statistics))

    def _train_slab(
        self, broadcast: Sequence[TfTensor], slab: Sequence[ShareT], states: Sequence[TfTensor]
    ) -> tuple[list[TfTensor], TfTensor]:
        import tensorflow as tf

        done, statistics = [], []
        for number, (device, share) in enumerate(zip(self._devices, slab, strict=True)):
            with tf.device(device), gradients_summed_in_order():
                summed, rows = self._loop(number, broadcast, share, states[number])
            done.append(summed)
            statistics.append(rows)
        return done, tf.concat(statistics, axis=0)


def assigned_devices(devices: Sequence[str] | None, workers: int) -> list[str | None]:
    """Returns a device for each worker, in turn; None lets TensorFlow decide."""
    return [devices[number % len(devices)] if devices else None for number in range(workers)]


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
        self, number: int, broadcast: Sequence[TfTensor], share: Share[TfTensor], state: TfTensor
    ) -> tuple[TfTensor, TfTensor]:
        """Trains the clients of one worker sequentially."""
        import tensorflow as tf

        from fedemb.privacy.dp_query import MechanismQuery

        worker, query = self._workers[number], MechanismQuery(self.mechanism)
        objective = self.objective.on_this_device()
        epochs = objective.config.epochs

        def body(
            index: TfTensor, state: TfTensor, rows: tf.TensorArray
        ) -> tuple[TfTensor, TfTensor, tf.TensorArray]:
            start, stop = share.offsets[index], share.offsets[index + 1]
            data = LocalData(
                images=share.data.images[start:stop],
                rows=share.data.rows[start:stop],
                order=share.data.order[epochs * start : epochs * stop],
                draws=share.data.draws[epochs * start : epochs * stop],
                head=share.data.head[share.heads[index] : share.heads[index + 1]],
            )
            update, losses = train_client(objective, worker, broadcast, data)
            state = state + query.preprocess_record((), update)
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
