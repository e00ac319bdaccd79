"""The round of DP-SGD: one mean gradient of each unit, clipped and summed exactly.

A unit is what the policy protects: a user, or one image. Its record is the mean gradient over
its images and their augmented views, taken before the clip (Abadi et al., arXiv 1607.00133;
De et al., arXiv 2204.13650, section 3.2). Units go through the net in micro-batches of a fixed
public size, side by side in one vectorised map, and are clipped one after the other.

The layout of a batch can change a record by a thousandth of the clip (an activation near its kink),
so it must not depend on data: every micro-batch has the same size, the last one is padded, and
padding is never added. Before the first private image is read, `require_exact` checks that a record
has the same bits at any position and in any batch.
"""

# The numeric libraries are not fully typed; the project's own signatures are checked.
# pyright: reportMissingTypeStubs=false, reportPrivateUsage=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false
# pyright: reportUnknownMemberType=false, reportUnknownParameterType=false
# pyright: reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, NamedTuple, cast

import numpy as np
from typing_extensions import override

from fedemb.config import UnitGradientConfig
from fedemb.models.backbones import HEAD, without_head
from fedemb.models.keras_backend import (
    AnyTensor,
    Model,
    Part,
    Tensor,
    TfTensor,
    Variable,
    keras_ops,
    preprocess,
)
from fedemb.models.losses import NEVER
from fedemb.privacy.running import Mechanism
from fedemb.training.rounds import ClientExamples, Slab, VectorizedRounds, seed_of
from fedemb.training.tensorflow_clients import ParallelRounds, assigned_devices

SLAB_MICROBATCHES = 16
"""Maximum number of micro-batches per slab and worker."""
_LANES = 16
"""Maximum vector width of a processor."""


_Records = tuple[TfTensor, TfTensor, TfTensor]
"""Updates `[microbatch, dim]`, their losses and their numbers of images. Raw."""


class UnitShare(NamedTuple, Generic[Part]):
    """Units of a slab for one worker, in whole micro-batches. Raw."""

    images: Part
    """uint8 `[units, images, size, size, channels]`; zeros for missing images."""
    labels: Part
    """int32 `[units, images]`."""
    weights: Part
    """float32 `[units, images]`: 1 / images of the unit; 0 for missing images."""
    moves: Part
    """int32 `[units, images, views, 3]`."""
    real: Part
    """int32 scalar: number of units; the rest is padding."""


class UnitRounds(VectorizedRounds[UnitShare[np.ndarray]]):
    """Base class of rounds of units in whole micro-batches, on any backend."""

    layout = "training.unit_gradient.microbatch"

    def _set_model(
        self, classifier: Model, config: UnitGradientConfig, variables: Sequence[Variable]
    ) -> list[tuple[int, ...]]:
        """Sets the trained model; returns the shapes of its trained tensors."""
        self._classifier, self._trunk = classifier, without_head(classifier)
        self._config, self._parallel_units = config, config.microbatch
        self.variables = list(variables)
        self._image = tuple(classifier.input_shape[1:])
        self._classes = int(classifier.output_shape[-1])
        return [tuple(int(n) for n in v.shape) for v in self.variables]

    def _share(
        self, units: Sequence[ClientExamples], round_index: int, multiple: int
    ) -> UnitShare[np.ndarray]:
        config = self._config
        shape = (-(-len(units) // multiple) * multiple, config.images_per_unit)
        share = UnitShare(
            images=np.zeros((*shape, *self._image), np.uint8),
            labels=np.zeros(shape, np.int32),
            weights=np.zeros(shape, np.float32),
            moves=np.zeros((*shape, config.views, 3), np.int32),
            real=np.array(len(units), np.int32),
        )
        for place, unit in enumerate(units):
            count = min(len(unit.labels), config.images_per_unit)
            share.images[place, :count] = unit.images[:count]
            share.labels[place, :count] = unit.labels[:count]
            share.weights[place, :count] = 1.0 / count
            if config.views > 1 or config.crop_padding or config.flip:
                seed = seed_of(self.seed, round_index, unit.grouping, unit.group)
                share.moves[place] = draw_moves(config, seed)
        return share

    def _generated_unit(self, group: int, random: np.random.Generator) -> ClientExamples:
        images = random.integers(0, 256, (self._config.images_per_unit, *self._image), np.uint8)
        labels = random.integers(0, self._classes, self._config.images_per_unit)
        return ClientExamples(0, group, images, labels)

    def _views(self, units: UnitShare[AnyTensor]) -> AnyTensor:
        """Returns all preprocessed views of the units of a micro-batch, `[units, views, ...]`."""
        ops, config = keras_ops(), self._config
        size, images = config.microbatch, config.images_per_unit
        pixels = ops.reshape(units.images, (size * images, *self._image))
        moves = ops.reshape(units.moves, (size * images, config.views, 3))
        views = preprocess(apply_moves(pixels, moves))
        return ops.reshape(views, (size, images * config.views, *self._image))

    def _logits(self, weights: Sequence[AnyTensor], images: AnyTensor) -> AnyTensor:
        """Returns logits with `weights` instead of `variables`.

        The head is one product with the bias as last row, padded with unused classes to a multiple
        of the vector width. Otherwise rows of, for example, ten numbers would be vectorized
        differently at different positions of a micro-batch.
        """
        ops = keras_ops()
        given = {id(v): w for v, w in zip(self.variables, weights, strict=True)}

        def values(variables: Sequence[Variable]) -> list[AnyTensor]:
            return cast("list[AnyTensor]", [given.get(id(v), v.value) for v in variables])

        trunk, head = self._trunk, self._classifier.get_layer(HEAD)
        outputs, *_ = trunk.stateless_call(
            values(trunk.trainable_variables),
            values(trunk.non_trainable_variables),
            images,
            training=True,
        )
        outputs = ops.cast(outputs, "float32")
        kernel, bias = values([head.kernel, head.bias])
        filled = -self._classes % _LANES
        kernel = ops.pad(kernel, [[0, 0], [0, filled]])
        bias = ops.pad(bias, [[0, filled]], constant_values=NEVER)
        outputs = ops.concatenate([outputs, ops.ones_like(outputs[:, :1])], axis=1)
        return ops.matmul(outputs, ops.concatenate([kernel, bias[None]], axis=0))


class UnitGradientFunction(UnitRounds, ParallelRounds[UnitShare[TfTensor]]):
    """Sums the clipped mean gradients of the units of a round, on TensorFlow.

    Args:
      classifier: `keras.Model` from `build_classifier`; not changed by rounds.
      mechanism: its query clips and rounds each record.
      config: micro-batches, views.
      variables: trained variables.
      seed: seed of the views; never of noise or sampling.
      workers: micro-batches computed in parallel, see `RoundFunction`.
      devices: device names, assigned to workers in turn. None lets TensorFlow decide.
    """

    def __init__(
        self,
        classifier: Model,
        mechanism: Mechanism,
        config: UnitGradientConfig,
        *,
        variables: Sequence[Variable],
        seed: int = 0,
        workers: int = 1,
        devices: Sequence[str] | None = None,
    ) -> None:
        import tensorflow as tf

        shapes = self._set_model(classifier, config, variables)
        self._add = tf.function(self._clip_and_add, jit_compile=True, autograph=False)
        images = config.images_per_unit
        super().__init__(
            shapes,
            mechanism,
            UnitShare(
                tf.TensorSpec([None, images, *self._image], tf.uint8),
                tf.TensorSpec([None, images], tf.int32),
                tf.TensorSpec([None, images], tf.float32),
                tf.TensorSpec([None, images, config.views, 3], tf.int32),
                tf.TensorSpec([], tf.int32),
            ),
            slab_units=SLAB_MICROBATCHES * config.microbatch * workers,
            seed=seed,
            devices=assigned_devices(devices, workers),
        )

    def _pack(self, units: Sequence[ClientExamples], round_index: int) -> Slab:
        size = self._config.microbatch
        batches = [units[start : start + size] for start in range(0, len(units), size)]
        shares = [batches[worker :: self.worker_count] for worker in range(self.worker_count)]
        units_of = ([unit for batch in share for unit in batch] for share in shares)
        return Slab([self._share(chosen, round_index, size) for chosen in units_of])

    def _sums_by_worker(
        self, weights: np.ndarray, units: Sequence[ClientExamples]
    ) -> list[np.ndarray]:
        import tensorflow as tf

        broadcast = [tf.constant(part) for part in self._split(weights)]
        empty = [np.zeros(self.dim, np.int64)] * self.worker_count
        slab = [self._share(units, 0, self._parallel_units)] * self.worker_count
        states, _ = self._train(broadcast, slab, empty)
        return [np.asarray(state) for state in states]

    @override
    def _loop(
        self,
        number: int,
        broadcast: Sequence[TfTensor],
        share: UnitShare[TfTensor],
        state: TfTensor,
    ) -> tuple[TfTensor, TfTensor]:
        """Computes the micro-batches of one worker sequentially."""
        import tensorflow as tf

        del number  # all workers read the same weights
        size = self._config.microbatch

        def add(
            place: TfTensor,
            base: TfTensor,
            records: _Records,
            state: TfTensor,
            rows: tf.TensorArray,
        ) -> tuple[TfTensor, TfTensor, _Records, TfTensor, tf.TensorArray]:
            update, loss, count = (part[place] for part in records)
            state, norm = self._add(update, state)
            row = tf.stack([norm, loss, loss, count])
            return place + 1, base, records, state, rows.write(base + place, row)

        def microbatch(
            start: TfTensor, state: TfTensor, rows: tf.TensorArray
        ) -> tuple[TfTensor, TfTensor, tf.TensorArray]:
            chosen = UnitShare(*[part[start : start + size] for part in share[:4]], real=share.real)
            real = tf.minimum(size, share.real - start)
            _, _, _, state, rows = tf.while_loop(
                lambda place, *_: place < real,
                add,
                (tf.constant(0), start, self._records(broadcast, chosen), state, rows),
                parallel_iterations=1,
            )
            return start + size, state, rows

        rows = tf.TensorArray(tf.float32, size=share.real, element_shape=[4])
        _, state, rows = tf.while_loop(
            lambda start, *_: start < share.real,
            microbatch,
            (tf.constant(0), state, rows),
            parallel_iterations=1,
        )
        return state, rows.stack()

    def _clip_and_add(self, update: TfTensor, state: TfTensor) -> tuple[TfTensor, TfTensor]:
        """Adds the record of one unit to the sum; also returns its norm, float32."""
        import tensorflow as tf

        from fedemb.privacy.dp_query import MechanismQuery

        norm = tf.norm(tf.cast(update, tf.float64))
        record = MechanismQuery(self.mechanism).preprocess_record((), [update])
        return state + record, tf.cast(norm, tf.float32)

    def _records(self, broadcast: Sequence[TfTensor], units: UnitShare[TfTensor]) -> _Records:
        """Returns negative mean gradients `[microbatch, dim]`, losses and counts `[microbatch]`."""
        import tensorflow as tf

        size, config = self._config.microbatch, self._config
        views = self._views(units)

        def record(unit: tuple[TfTensor, TfTensor, TfTensor]) -> tuple[TfTensor, TfTensor]:
            images, labels, weights = unit
            labels = tf.repeat(labels, config.views)
            weights = tf.repeat(weights / float(config.views), config.views)
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch(broadcast)
                losses = tf.nn.sparse_softmax_cross_entropy_with_logits(
                    labels, self._logits(broadcast, images)
                )
                loss = tf.reduce_sum(weights * losses)
            gradients = tape.gradient(
                loss, broadcast, unconnected_gradients=tf.UnconnectedGradients.ZERO
            )
            return tf.concat(
                [tf.reshape(-part, [-1]) for part in cast("list[TfTensor]", gradients)], axis=0
            ), loss

        labels, weights = (tf.ensure_shape(p, [size, None]) for p in (units.labels, units.weights))
        updates, losses = tf.vectorized_map(record, (views, labels, weights))
        counts = tf.cast(tf.math.count_nonzero(weights, axis=1), tf.float32)
        return updates, losses, counts


# Augmented views of an image: crops with a mirrored border, and mirror images.
#
# Moves are drawn on the host from the unit's seed and applied as whole pixels, so a view has the
# same bits on any device.


def draw_moves(config: UnitGradientConfig, seed: np.random.SeedSequence) -> np.ndarray:
    """Draws the views of all images of a unit.

    Args:
      config: images, views, crop and flip.
      seed: seed of the unit in the round; used for nothing else.

    Returns:
      int32 `[images_per_unit, views, 3]`: pixels down, pixels right, whether mirrored.
    """
    shape = (config.images_per_unit, config.views)
    words = seed.generate_state(int(np.prod(shape))).reshape(shape)
    reach = 2 * config.crop_padding + 1
    down = (words & 0xFFFF) % reach
    right = ((words >> 16) & 0x7FFF) % reach
    mirrored = (words >> 31) if config.flip else np.zeros_like(words)
    moves = np.stack([down, right, mirrored], axis=-1).astype(np.int32)
    return moves - np.array([config.crop_padding, config.crop_padding, 0], np.int32)


def apply_moves(images: Tensor, moves: Tensor) -> Tensor:
    """Moves each image by whole pixels, with a mirrored border.

    Args:
      images: uint8 `[images, size, size, channels]`.
      moves: int32 `[images, views, 3]`.

    Returns:
      uint8 `[images * views, size, size, channels]`.
    """
    ops = keras_ops()
    _, size, _, channels = cast("tuple[int, ...]", images.shape)
    per_image = moves.shape[1]
    moves = ops.reshape(moves, (-1, 3))
    places = ops.arange(size, dtype="int32")[None, :]

    def inside(shift: Tensor) -> Tensor:
        at = ops.abs(places + shift[:, None])
        return (size - 1) - ops.abs((size - 1) - at)

    down, right = inside(moves[:, 0]), inside(moves[:, 1])
    right = ops.where(moves[:, 2:3] > 0, ops.flip(right, axis=1), right)
    # Gathers whole pixels; no value is computed.
    image = ops.arange(ops.shape(moves)[0], dtype="int32") // per_image
    rows = (image[:, None] * size + down)[:, :, None] * size + right[:, None, :]
    return ops.take(ops.reshape(images, (-1, channels)), rows, axis=0)
