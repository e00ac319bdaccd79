"""Features of units: computed once, kept in the private store for a resumed run, deleted at its
end.
"""

import numpy as np
import pytest

from fedemb.config import ModelConfig
from fedemb.engine import ClientExamples, build_backbone, feature_cache
from fedemb.engine.feature_cache import FeatureCache
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


class _Loads:
    def __init__(self):
        self.seen = []

    def take(self, cache, number):
        def load():
            self.seen.append(number)
            return _unit(number)

        return cache.of(np.int64(number).tobytes(), load)


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


def test_nothing_stays_behind_a_finished_run(tmp_path):
    store, loads = open_store(str(tmp_path)), _Loads()
    cache = FeatureCache(build_backbone(MODEL, 0), store, "a" * 8)
    for number in range(6):
        loads.take(cache, number)
    resumed = FeatureCache(build_backbone(MODEL, 0), store, "a" * 8)
    assert store.list("features/")
    resumed.delete()
    assert store.list("features/") == []
