"""Features of units: computed once."""

import logging
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import keras
import numpy as np
import pytest

from fedemb.config import AugmentationConfig, LocalTrainingConfig, ModelConfig
from fedemb.data.client_data import choose_examples
from fedemb.foundation import step_logging as events
from fedemb.models.backbone_files import load_backbone, save_backbone
from fedemb.models.backbones import build_backbone, cut, trainable_variables
from fedemb.models.keras_backend import preprocess
from fedemb.privacy.sampling import VirtualClient
from fedemb.training.feature_cache import (
    SIZE,
    FeatureCache,
    FrozenFeatures,
    MicroBatches,
    keeps_features,
    plain_rows,
    same_bits_anywhere,
    unit_key,
)
from fedemb.training.rounds import ClientExamples
from fedemb.training.tensorflow_clients import RoundFunction
from tests.kit.privacy_worlds import noiseless

MODEL = ModelConfig(backbone="tiny", image_size=12, embedding_dim=8)


def _unit(number):
    random = np.random.default_rng(number)
    count = 1 + number % 3
    images = random.integers(0, 256, (count, 12, 12, 1), np.uint8)
    return ClientExamples(0, number, images, random.integers(0, 4, count))


def _key(number):
    return np.int64(number).tobytes()


class _Loads:
    def __init__(self):
        self.seen = []

    def take(self, cache, number):
        def load():
            self.seen.append(number)
            return _unit(number)

        return cache.of(_key(number), load)


def _photos(count, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (count, 12, 12, 1), np.uint8)


@pytest.mark.parametrize("backbone", ["tiny", "resnet8", "scatter_linear"])
def test_features_are_bit_identical_at_any_batch_position(backbone):
    model = MODEL.model_copy(update={"backbone": backbone})
    batches = MicroBatches(build_backbone(model, 0))
    assert batches.size == SIZE
    photos = _photos(3 * SIZE + 5)
    together = batches(photos)
    order = np.random.default_rng(1).permutation(len(photos))
    np.testing.assert_array_equal(batches(photos[order]), together[order])
    for place in (0, 7, len(photos) - 1):
        np.testing.assert_array_equal(batches(photos[place : place + 1])[0], together[place])
    alone = build_backbone(model, 0)(preprocess(photos[-1:]), training=False)[0]
    np.testing.assert_allclose(together[-1], alone, atol=1e-5)


class _LessBatchMean(keras.layers.Layer):
    """Mixes the images of a batch, so that a feature depends on other users."""

    def call(self, inputs):
        return inputs - keras.ops.mean(inputs, axis=0, keepdims=True)


def test_backbone_that_mixes_a_batch_is_run_one_image_at_a_time(caplog):
    inner = build_backbone(MODEL, 0)
    mixing = keras.Model(inner.input, _LessBatchMean()(keras.layers.Flatten()(inner.input)))
    with caplog.at_level(logging.WARNING):
        batches = MicroBatches(mixing)
    assert batches.size == 1
    assert events.ONE_BY_ONE in caplog.text
    photos = _photos(5)
    np.testing.assert_array_equal(batches(photos)[3:], batches(photos[3:]))


def test_probe_finds_position_dependent_bits():
    def compute(images):
        found = images.reshape(len(images), -1).astype(np.float32)
        found[3:4] *= np.float32(1 + 2**-23)
        return found

    assert not same_bits_anywhere(compute, (12, 12, 1))


def _fill(cache, count):
    cache.fill((np.int64(n).tobytes(), partial(_unit, n)) for n in range(count))


def test_units_of_several_threads_keep_their_own_features():
    """The audit reads a round again while the next one is read."""
    backbone = build_backbone(MODEL, 0)
    shared, alone, loads = FeatureCache(backbone), FeatureCache(backbone), _Loads()
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(partial(loads.take, shared), range(40)))
    for number, rows in enumerate(found):
        np.testing.assert_array_equal(rows, loads.take(alone, number))


def test_a_filled_cache_holds_the_features_of_units_read_one_by_one(tmp_path):
    backbone = build_backbone(MODEL, 0)
    filled, alone = FeatureCache(backbone), FeatureCache(backbone)
    _fill(filled, 40)
    nobody, loads = _Loads(), _Loads()
    for number in range(40):
        found = nobody.take(filled, number)
        np.testing.assert_array_equal(found, loads.take(alone, number))
    assert nobody.seen == []


# ---- Local training ----


MODEL_FROZEN = ModelConfig(
    backbone="resnet8", image_size=12, embedding_dim=8, trainable="projection"
)
LOCAL = LocalTrainingConfig(
    epochs=2, batch_size=5, client_learning_rate=0.02, max_examples_per_client=9
)
USERS = [4, 1, 0, 7, 3]
"""How many images they have."""


class _People:
    """Five users, and who was read."""

    def __init__(self):
        random = np.random.default_rng(0)
        self.images = [random.integers(0, 256, (n, 12, 12, 1), np.uint8) for n in USERS]
        self.labels = [random.integers(0, 3, n) for n in USERS]
        self.read = []

    def load(self, client):
        self.read.append(client.users.tolist())
        users = np.sort(client.users)
        chosen = choose_examples([USERS[user] for user in users], LOCAL.max_examples_per_client)
        images = [self.images[users[n]][turn] for n, turn in chosen]
        labels = [self.labels[users[n]][turn] for n, turn in chosen]
        shaped = np.array(images, np.uint8).reshape(-1, 12, 12, 1)
        return ClientExamples(client.grouping, client.group, shaped, np.array(labels, np.int64))


def _client(*users):
    return VirtualClient(0, 3, np.array(users, np.int64))


def _cache(trunk):
    return FeatureCache(trunk, plain_rows)


def _sum(function, clients):
    total = function(function.initial_weights(), clients, 0).total
    return np.asarray(total, np.float64) / 2.0**function.mechanism.plan.grid_bits


@pytest.mark.long
def test_update_from_cached_features_equals_update_from_images():
    people, backbone = _People(), build_backbone(MODEL_FROZEN, 0)
    variables = trainable_variables(backbone, "projection")
    whole = RoundFunction(backbone, noiseless(5.0), LOCAL, variables=variables, seed=4)
    trunk, tip = cut(backbone, "projection")
    short = RoundFunction(tip, noiseless(5.0), LOCAL, seed=4)
    np.testing.assert_array_equal(short.initial_weights(), whole.initial_weights())
    frozen = FrozenFeatures(_cache(trunk), people.load, LOCAL.max_examples_per_client)
    client = _client(3, 0, 4)
    assert len(people.load(client).labels) == 9  # of 14
    wanted, found = _sum(whole, [people.load(client)]), _sum(short, [frozen.load(client)])
    assert np.linalg.norm(wanted) > 0.1
    np.testing.assert_allclose(found, wanted, atol=1e-4)


def test_users_are_read_once_and_keep_their_features_in_any_client():
    people, (trunk, _) = _People(), cut(build_backbone(MODEL_FROZEN, 0), "projection")
    frozen = FrozenFeatures(_cache(trunk), people.load, 100)
    one, other = frozen.load(_client(4, 0, 2)), frozen.load(_client(3, 1))
    assert people.read == [[0], [2], [4], [1], [3]]
    assert one.images.dtype == np.float32
    assert one.images.shape == (7, trunk.output_shape[-1])
    assert (one.grouping, one.group) == (0, 3)
    less = frozen.load(_client(4, 2))
    np.testing.assert_array_equal(less.images, one.images[4:])
    np.testing.assert_array_equal(less.labels, one.labels[4:])
    moved = frozen.load(_client(4, 1))  # who else is there changes nothing of them, to the bit
    np.testing.assert_array_equal(moved.images[1:], less.images)
    np.testing.assert_array_equal(moved.images[:1], other.images[:1])
    nobody = frozen.load(_client())
    assert nobody.images.shape == (0, trunk.output_shape[-1])
    assert people.read[5:] == [[2]]  # a user without images is requested again


FAR = [3, 3 + 256, 3 + 65_536, 3 + 2**32, 0, 256]
"""Rows whose numbers share their low byte, or their low 16 or 32 bits."""


@pytest.mark.long
def test_users_with_equal_low_bits_of_row_numbers_never_share_features():
    """Rows that share their low bits: a key of a byte gives one user the features of another."""
    trunk, _ = cut(build_backbone(MODEL_FROZEN, 0), "projection")

    def images_of(row):
        random = np.random.default_rng(row)
        return random.integers(0, 256, (2, 12, 12, 1), np.uint8), np.array([row % 3, 2])

    def load(client):
        (row,) = client.users
        return ClientExamples(client.grouping, client.group, *images_of(int(row)))

    kept = FrozenFeatures(_cache(trunk), load, 100)
    for row in FAR:
        own = FrozenFeatures(_cache(trunk), load, 100).load(_client(row)).images
        np.testing.assert_array_equal(kept.load(_client(row)).images, own)


def test_unit_key_depends_on_the_whole_row_number_and_the_image_place():
    """As training of a head keeps features: by the row of a unit, and the place of an image."""
    clients = [VirtualClient(place, 7, np.array([row])) for row in FAR for place in (0, 1, 256)]
    keys = {unit_key(client) for client in clients}
    assert len(keys) == len(clients)
    assert len({len(key) for key in keys}) == 1
    of_another_group = VirtualClient(0, 8, np.array([FAR[0]]))
    assert unit_key(of_another_group) == unit_key(clients[0])


def test_cut_network_is_saved_unchanged(tmp_path):
    backbone = build_backbone(MODEL_FROZEN, 0)
    before = save_backbone(backbone, tmp_path / "before.keras")
    trunk, tip = cut(backbone, "projection")
    assert save_backbone(backbone, tmp_path / "after.keras") == before
    images = np.random.default_rng(1).uniform(-1, 1, (4, 12, 12, 1)).astype(np.float32)
    again = load_backbone(tmp_path / "after.keras", MODEL_FROZEN)
    np.testing.assert_allclose(tip(trunk(images)), again(images), atol=1e-6)


def test_features_are_cached_only_for_a_frozen_trunk_without_augmentation():
    assert keeps_features(MODEL_FROZEN, LOCAL)
    moving = LOCAL.model_copy(update={"augmentation": AugmentationConfig()})
    assert not keeps_features(MODEL_FROZEN, moving)
    assert not keeps_features(MODEL_FROZEN.model_copy(update={"trainable": "all"}), LOCAL)
