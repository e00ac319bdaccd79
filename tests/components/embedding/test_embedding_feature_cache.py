"""Features of units: computed once."""

import logging
from functools import partial

import keras
import numpy as np
import pytest

from fedemb.config import ModelConfig
from fedemb.foundation import step_logging as events
from fedemb.models.keras_backend import preprocess
from fedemb.training import ClientExamples, build_backbone
from fedemb.training.feature_cache import (
    SIZE,
    FeatureCache,
    FeatureProgress,
    MicroBatches,
    same_bits_anywhere,
)

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
def test_features_have_the_same_bits_with_any_neighbours_at_any_position(backbone):
    model = MODEL.model_copy(update={"backbone": backbone})
    batches = MicroBatches(build_backbone(model, 0))
    assert batches.size == SIZE
    photos = _photos(3 * SIZE + 5)
    together = batches(photos)
    order = np.random.default_rng(1).permutation(len(photos))
    np.testing.assert_array_equal(batches(photos[order]), together[order])
    for place in (0, 7, len(photos) - 1):
        np.testing.assert_array_equal(batches(photos[place : place + 1])[0], together[place])


class _LessBatchMean(keras.layers.Layer):
    """Mixes the images of a batch, so that a feature depends on other users."""

    def call(self, inputs):
        return inputs - keras.ops.mean(inputs, axis=0, keepdims=True)


def test_backbone_whose_features_depend_on_neighbours_computes_one_image_at_a_time(caplog):
    inner = build_backbone(MODEL, 0)
    mixing = keras.Model(inner.input, _LessBatchMean()(keras.layers.Flatten()(inner.input)))
    with caplog.at_level(logging.WARNING):
        batches = MicroBatches(mixing)
    assert batches.size == 1
    assert events.ONE_BY_ONE in caplog.text
    photos = _photos(5)
    np.testing.assert_array_equal(batches(photos)[3:], batches(photos[3:]))


def test_probe_finds_a_position_with_other_bits():
    def compute(images):
        found = images.reshape(len(images), -1).astype(np.float32)
        found[3:4] *= np.float32(1 + 2**-23)
        return found

    assert not same_bits_anywhere(compute, (12, 12, 1))


def test_padding_of_the_last_micro_batch_changes_no_bits():
    batches = MicroBatches(build_backbone(MODEL, 0))
    photos = _photos(SIZE + 1)
    last = batches(photos)[-1]
    np.testing.assert_array_equal(last, batches(photos[-1:])[0])
    alone = build_backbone(MODEL, 0)(preprocess(photos[-1:]), training=False)[0]
    np.testing.assert_allclose(last, alone, atol=1e-6)


def _fill(cache, count, progress=None):
    cache.fill(((np.int64(n).tobytes(), partial(_unit, n)) for n in range(count)), progress)


def test_a_filled_cache_holds_the_features_of_units_read_one_by_one(tmp_path):
    backbone = build_backbone(MODEL, 0)
    filled, alone = FeatureCache(backbone), FeatureCache(backbone)
    _fill(filled, 40)
    nobody, loads = _Loads(), _Loads()
    for number in range(40):
        found = nobody.take(filled, number)
        np.testing.assert_array_equal(found, loads.take(alone, number))
    assert nobody.seen == []


def test_progress_reveals_nothing_above_the_public_number_of_units(caplog):
    """Twenty thousand units instead of the planned 40 log the same lines."""
    said = []
    for units in (40, 20_000):
        caplog.clear()
        with caplog.at_level(logging.INFO):
            progress = FeatureProgress(40)
            for done in range(units + 1):
                progress(done)
        said.append([record.getMessage() for record in caplog.records])
    assert said[0] == said[1] == [events.FEATURES % n for n in range(5, 100, 5)]
    caplog.clear()
    FeatureProgress(None)(7)  # sampled units
    assert not caplog.records
