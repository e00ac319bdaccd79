"""Bugs of DP-SGD engines that happened elsewhere, each planted and seen red.

A fault replaces one part of a sound round; `problems` names what is wrong with a round, and must
find nothing in the sound one. Nothing in the product knows of this module.
"""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import tensorflow as tf

from fedemb.config import ModelConfig, ServerConfig, UnitGradientConfig
from fedemb.engine.rounds import ClientExamples, seed_of
from fedemb.engine.server import initial_state, released_weights
from fedemb.engine.units.unit_gradient import UnitGradientFunction, UnitShare
from fedemb.engine.units.views import apply_moves, draw_moves
from fedemb.models.backbones import trainable_variables
from fedemb.models.classifier import with_head
from fedemb.privacy.mechanisms.not_private import NotPrivate
from fedemb.privacy.queries import build_mechanism

SIZE, CLASSES, CLIP, ROUND, SEED = 8, 4, 0.05, 2, 5
MODEL = ModelConfig(
    image_size=SIZE, embedding_dim=16, classes=tuple("abcd"), head_init="glorot", backbone="dense"
)
CONFIG = UnitGradientConfig(images_per_unit=2, microbatch=16, views=2, flip=True, crop_padding=1)
GRID = 2.0**32


def _mechanism(clip=CLIP):
    plan = NotPrivate(
        rounds=10,
        l2_norm_clip=clip,
        noise_multiplier=0.0,
        virtual_clients=40,
        groupings=1,
        sampling_probability=0.5,
    )
    return build_mechanism(plan, b"k" * 32, "run", 1, "0" * 64)


def _classifier():
    import keras

    keras.utils.set_random_seed(3)
    inputs = keras.Input((SIZE, SIZE, 1))
    hidden = keras.layers.Dense(16, activation="tanh", name="embedding")(
        keras.layers.Flatten()(inputs)
    )
    return with_head(keras.Model(inputs, hidden), MODEL)


def _units(count=20):
    random = np.random.default_rng(0)
    return [
        ClientExamples(
            0,
            100 + group,
            random.integers(0, 256, (1 + group % 2, SIZE, SIZE, 1), np.uint8),
            random.integers(0, CLASSES, 1 + group % 2),
        )
        for group in range(count)
    ]


@dataclass
class Round:
    """The parts of a round; the defaults are the product's."""

    function: type = UnitGradientFunction
    group: str = "all"
    trained: str = "all"
    clip: float = CLIP

    def build(self):
        classifier = _classifier()
        function = self.function(
            classifier,
            _mechanism(self.clip),
            CONFIG,
            variables=trainable_variables(classifier, self.trained),
            seed=SEED,
        )
        function._layout_checked = (
            True  # the probe is tested beside the engine; here it would hide a layer
        )
        return classifier, function


def _total(function, units):
    sums = function(function.initial_weights(), units, ROUND)
    return np.asarray(sums.sample_state[0])


def _reference(classifier, variables, unit, clip):
    """The clipped mean gradient of one unit, eager, in units of the clip."""
    moves = draw_moves(CONFIG, seed_of(SEED, ROUND, 0, unit.group))[: len(unit.labels)]
    views = tf.cast(apply_moves(tf.constant(unit.images), moves), tf.float32) / 128.0 - 1.0
    with tf.GradientTape() as tape:
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(
            np.repeat(unit.labels, CONFIG.views), classifier(views)
        )
        loss = tf.reduce_mean(losses)
    parts = tape.gradient(loss, [v.value for v in variables])
    flat = -np.concatenate([np.ravel(part) for part in parts]).astype(np.float64)
    return flat / max(clip, np.linalg.norm(flat))


def problems(round_):
    """What is wrong with a round; no news is good news."""
    found = []
    classifier, function = round_.build()
    units = _units()
    whole = _total(function, units)
    declared = trainable_variables(classifier, round_.group)
    dim = sum(int(np.prod(v.shape)) for v in declared)
    if len(whole) != dim:
        return [f"{len(whole)} weights are summed, the declared group has {dim}"]
    alone = [_total(function, [unit]) for unit in units]
    if max(np.linalg.norm(record / GRID) for record in alone) > 1.0:
        found.append("one unit moves the sum by more than the clip")
    for place in (0, 7, 19):
        rest = _total(function, units[:place] + units[place + 1 :])
        if (whole - rest != alone[place]).any():
            found.append("one unit moves more than its own record")
    if (whole != _total(function, units[::-1])).any():
        found.append("the order of units matters")
    expected = sum(_reference(classifier, declared, unit, round_.clip) for unit in units)
    if np.linalg.norm(whole / GRID - expected) > 1e-3 * np.linalg.norm(expected):
        found.append("the sum is not that of the clipped mean gradients")
    return found


def _with(**methods):
    """A fault: the sound function with some methods replaced."""
    return type("Faulty", (UnitGradientFunction,), methods)


def views_clipped_one_by_one():
    """Each view is a record of its own: K clips for one unit."""

    def slabs(self, clients, round_index):
        views = [replace(c, group=c.group) for c in clients for _ in range(CONFIG.views)]
        return UnitGradientFunction.slabs(self, views, round_index)

    return Round(_with(slabs=slabs))


def microbatch_mean_clipped():
    """As `num_microbatches` elsewhere: the mean over neighbours is clipped, not each unit."""

    def records(self, broadcast, units):
        updates, losses, counts = UnitGradientFunction._records(self, broadcast, units)
        return tf.zeros_like(updates) + tf.reduce_mean(updates, axis=0), losses, counts

    return Round(_with(_records=records))


def noise_per_microbatch():
    """Noise goes into every micro-batch, so how much there is tells the number of participants."""

    def records(self, broadcast, units):
        updates, losses, counts = UnitGradientFunction._records(self, broadcast, units)
        noise = tf.random.stateless_normal(tf.shape(updates)[1:], [1, 2])
        return tf.concat([updates[:1] + noise, updates[1:]], axis=0), losses, counts

    return Round(_with(_records=records))


def padding_contributes():
    """What fills the last micro-batch is added: the bias gradient of an image of zeros."""

    def share(self, units, round_index, size):
        sound = UnitGradientFunction._share(self, units, round_index, size)
        weights = np.where(sound.weights.sum(1, keepdims=True) == 0, 0.5, sound.weights)
        full = sound._replace(weights=weights.astype(np.float32), real=np.int32(len(weights)))
        return UnitShare(*full)

    return Round(_with(_share=share))


def seeds_by_position():
    """Views follow from the place in the batch: who comes before changes them."""

    def share(self, units, round_index, size):
        moved = [replace(unit, group=place) for place, unit in enumerate(units)]
        return UnitGradientFunction._share(self, moved, round_index, size)

    return Round(_with(_share=share))


def images_mixed_across_units():
    """Mixup: a unit's record holds its neighbour's image."""

    def share(self, units, round_index, size):
        sound = UnitGradientFunction._share(self, units, round_index, size)
        mixed = sound.images // 2 + np.roll(sound.images, 1, axis=0) // 2
        return sound._replace(images=mixed)

    return Round(_with(_share=share))


def batch_statistics_across_units():
    """BatchNorm's effect: records are centred by the mean of the micro-batch."""

    def records(self, broadcast, units):
        updates, losses, counts = UnitGradientFunction._records(self, broadcast, units)
        return updates - tf.reduce_mean(updates, axis=0), losses, counts

    return Round(_with(_records=records))


def weight_decay_inside_the_clip():
    """The penalty is clipped with the gradient and takes room from it."""

    def records(self, broadcast, units):
        updates, losses, counts = UnitGradientFunction._records(self, broadcast, units)
        weights = tf.concat([tf.reshape(part, [-1]) for part in broadcast], axis=0)
        return updates - 0.1 * weights, losses, counts

    return Round(_with(_records=records))


def all_layers_moved_under_a_declared_head():
    return Round(group="head", trained="all")


def sum_of_images_for_their_mean():
    """A unit with more images weighs more."""

    def share(self, units, round_index, size):
        sound = UnitGradientFunction._share(self, units, round_index, size)
        return sound._replace(weights=(sound.weights > 0).astype(np.float32) * 0.5)

    return Round(_with(_share=share), clip=100.0)


def norm_in_half_precision():
    """The record is scaled by a norm of eight bits and not clipped again."""

    def preprocess(params, record):
        flat = tf.cast(tf.reshape(record[0], [-1]), tf.float64)
        norm = tf.cast(tf.norm(tf.cast(flat, tf.bfloat16)), tf.float64)
        return (tf.cast(flat * (GRID / tf.maximum(params, norm)), tf.int64),)

    def init(self, classifier, mechanism, config, **more):
        mechanism.query.preprocess_record = preprocess
        UnitGradientFunction.__init__(self, classifier, mechanism, config, **more)

    return Round(_with(__init__=init))


FAULTS = [
    (views_clipped_one_by_one, "more than the clip"),
    (microbatch_mean_clipped, "its own record"),
    (noise_per_microbatch, "its own record"),
    (padding_contributes, "its own record"),
    (seeds_by_position, "its own record"),
    (images_mixed_across_units, "its own record"),
    (batch_statistics_across_units, "its own record"),
    (weight_decay_inside_the_clip, "clipped mean gradients"),
    (all_layers_moved_under_a_declared_head, "declared group"),
    (sum_of_images_for_their_mean, "clipped mean gradients"),
    (norm_in_half_precision, "more than the clip"),
]


@pytest.mark.planted_bug
def test_the_sound_round_is_green():
    assert problems(Round()) == []


@pytest.mark.planted_bug
@pytest.mark.parametrize(("fault", "word"), FAULTS, ids=[fault.__name__ for fault, _ in FAULTS])
def test_a_planted_bug_of_the_engine_is_seen(fault, word):
    assert any(word in problem for problem in problems(fault()))


def _average_problems(averaged):
    """The average must follow from noised records alone: anyone who replays them gets the same."""
    config = ServerConfig(ema_decay=0.5)
    random = np.random.default_rng(0)
    clean = random.normal(size=(4, 3)).astype(np.float32)
    noised = clean + random.normal(size=clean.shape).astype(np.float32)
    _, function = Round().build()
    state = replay = initial_state(np.zeros(3, np.float32))
    for mean, record in zip(clean, noised, strict=True):
        state = averaged(function, config, state, mean, record)
        replay = function.advance(config, replay, record)
    same = np.array_equal(released_weights(config, state), released_weights(config, replay))
    return [] if same else ["the average is not a function of the records"]


@pytest.mark.planted_bug
def test_an_average_of_weights_without_noise_is_seen():
    def sound(function, config, state, mean, record):
        return function.advance(config, state, record)

    def faulty(function, config, state, mean, record):
        clean = function.advance(config, state, mean)
        return replace(function.advance(config, state, record), average=clean.average)

    assert _average_problems(sound) == []
    assert _average_problems(faulty)


@pytest.mark.planted_bug
def test_another_micro_batch_is_another_run():
    """Its size is in the digest that a reservation, a round record and a checkpoint carry."""
    from fedemb.config.run import config_digest
    from tests.kit.pipeline_runs.training_run import config

    one = config()
    other = one.updated({"training.unit_gradient.microbatch": 32})
    assert config_digest(one) != config_digest(other)

    def without(run):  # the planted bug: the size is left out of what is digested
        return run.model_dump(exclude={"training": {"unit_gradient": {"microbatch"}}})

    assert without(one) == without(other)
