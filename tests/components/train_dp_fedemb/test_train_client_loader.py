"""Examples of virtual clients come from the users on disk, and stay decoded for a while."""

from types import SimpleNamespace

import numpy as np
import pytest

from fedemb.data.client_data import UserStore
from fedemb.training.trainer import ClientLoader, all_classes
from tests.kit.pipeline_runs.training_run import SIZE, config, write_users
from tests.kit.verified_folder import as_committed


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("feed") / "users"
    write_users(folder, users=20, virtual_clients=4, groupings=1)
    return UserStore(as_committed(folder))


def _client(*users):
    return SimpleNamespace(grouping=0, group=1, users=np.array(users, np.int64))


def test_client_examples_are_those_of_its_users(store):
    found = ClientLoader(store, config().model, max_examples=2048).load(_client(3, 5))
    assert found.images.shape == (6, SIZE, SIZE, 1)
    assert set(found.labels) == {label for user in store.read([3, 5]) for label in user.labels}
    assert len(ClientLoader(store, config().model, max_examples=2048).load(_client()).labels) == 0


def test_cache_is_bounded_in_bytes_and_keeps_what_was_used_last(store, monkeypatch):
    reads = []
    loader = ClientLoader(store, config().model, max_examples=2048, cache_bytes=2 * 3 * SIZE * SIZE)
    original = loader._read
    monkeypatch.setattr(loader, "_read", lambda users: reads.append(users[0]) or original(users))
    for user in (0, 1, 0, 2, 0, 1):  # room for two: 2 pushes 1 out, not 0
        loader.load(_client(user))
    assert reads == [0, 1, 2, 1]
    held = sum(images.nbytes for images, _ in loader._cache.values())
    assert held <= 2 * 3 * SIZE * SIZE


def test_shared_head_rows_come_from_all_classes(store):
    classes = all_classes(store)
    assert len(classes) == 21  # one of each user's own, and one shared by all
    found = ClientLoader(store, config().model, max_examples=2048, classes=classes).load(_client(3))
    np.testing.assert_array_equal(classes[found.labels], store.read([3])[0].labels)
