"""Features of units: computed once, kept in the private store for a resumed run, deleted at its
end.
"""

import errno
import logging
import os
from functools import partial

import keras
import numpy as np
import pytest

from fedemb.config import ModelConfig
from fedemb.engine import ClientExamples, build_backbone, feature_cache
from fedemb.engine.feature_cache import (
    SIZE,
    FeatureCache,
    FeatureProgress,
    MicroBatches,
    delete_features,
    open_features,
    plain_rows,
    rows_of,
    same_bits_anywhere,
)
from fedemb.errors import StorageError
from fedemb.foundation import step_logging as events
from fedemb.models.backbones import with_bfloat16
from fedemb.models.keras_backend import preprocess
from fedemb.storage import open_store

MODEL = ModelConfig(backbone="tiny", image_size=12, embedding_dim=8)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(feature_cache, "_BLOCK", 3)


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


def test_a_resumed_run_computes_only_what_is_missing(tmp_path):
    store, backbone = open_store(str(tmp_path)), build_backbone(MODEL, 0)
    first, again = _Loads(), _Loads()
    cache = FeatureCache(backbone, store, "a" * 8)
    before = [first.take(cache, number) for number in (*range(7), 0, 1)]
    assert first.seen == [*range(7)]
    resumed = FeatureCache(backbone, store, "a" * 8)
    after = [again.take(resumed, number) for number in range(8)]
    assert again.seen == [6, 7]  # two files of three units were whole
    for old, new in zip(before[:7], after, strict=False):
        np.testing.assert_array_equal(old, new)


def test_features_of_other_inputs_are_not_taken(tmp_path):
    """As those of another backbone would be: it is one of the inputs."""
    store = open_store(str(tmp_path))
    kept, other = _Loads(), _Loads()
    for inputs_sha, seed, loads in (("a" * 8, 0, kept), ("b" * 8, 1, other)):
        cache = FeatureCache(build_backbone(MODEL, seed), store, inputs_sha)
        for number in range(4):
            loads.take(cache, number)
    assert other.seen == kept.seen == [0, 1, 2, 3]


IMAGES = {"max_examples": 5, "one_image": False}


def test_nothing_stays_behind_a_finished_run(tmp_path):
    """Also features of an earlier process, and of other settings."""
    store, loads = open_store(str(tmp_path)), _Loads()
    for most in (5, 6):
        images = {**IMAGES, "max_examples": most}
        cache = open_features(store, "a" * 8, build_backbone(MODEL, 0), images, rows_of)
        for number in range(6):
            loads.take(cache, number)
    assert len({name.split("/")[1] for name in store.list("features/")}) == 2
    delete_features(store)
    assert store.list() == []


def _other(what):
    """Arguments of `open_features` with one other input."""
    inputs, trunk, images, rows = "a" * 8, build_backbone(MODEL, 0), IMAGES, rows_of
    if what == "inputs":
        inputs = "b" * 8
    if what == "weights":
        values = trunk.get_weights()
        values[0].flat[0] += 1e-6
        trunk.set_weights(values)
    if what == "precision":
        trunk = with_bfloat16(trunk)
    if what == "layers":
        trunk = keras.Model(trunk.input, trunk.layers[-2].output)
    if what == "images":
        images = {**IMAGES, "max_examples": 6}
    if what == "rows":
        rows = plain_rows
    return inputs, trunk, images, rows


@pytest.mark.parametrize(
    ("what", "shared"),
    [
        ("nothing", True),
        ("inputs", False),
        ("weights", False),
        ("precision", False),
        ("layers", False),
        ("images", False),
        ("rows", False),
    ],
)
def test_other_inputs_of_features_have_another_cache(tmp_path, what, shared):
    store, loads = open_store(str(tmp_path)), _Loads()
    for case in ("nothing", what):
        cache = open_features(store, *_other(case))
        loads.take(cache, 0)
        cache.save()
    assert (loads.seen == [0]) == shared


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


def test_full_disk_ends_the_computation_in_a_sentence_and_a_resumed_run_goes_on(
    tmp_path, monkeypatch
):
    store, backbone = open_store(str(tmp_path)), build_backbone(MODEL, 0)
    cache = FeatureCache(backbone, store, "a" * 8)
    _fill(cache, 3)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(StorageError, match="No space left"):
            _fill(cache, 6)
    loads, resumed = _Loads(), FeatureCache(backbone, store, "a" * 8)
    for number in range(6):
        loads.take(resumed, number)
    assert loads.seen == [3, 4, 5]  # what was written before is kept, and nothing is left in part


def test_features_computed_one_by_one_are_not_mixed_with_others(tmp_path, monkeypatch):
    store, backbone = open_store(str(tmp_path)), build_backbone(MODEL, 0)
    _fill(FeatureCache(backbone, store, "a" * 8), 6)
    monkeypatch.setattr(feature_cache, "same_bits_anywhere", lambda *_: False)
    loads, resumed = _Loads(), FeatureCache(backbone, store, "a" * 8)
    for number in range(6):
        loads.take(resumed, number)
    assert loads.seen == [*range(6)]
