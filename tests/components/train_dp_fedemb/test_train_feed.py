import threading
from types import SimpleNamespace

import numpy as np
import pytest

from fedemb.data.client_data import UserStore
from fedemb.errors import ArtifactError
from fedemb.steps.train_dp_fedemb.feed import ClientLoader, Feed, all_classes
from tests.training_run import SIZE, config, write_users


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("feed") / "users"
    write_users(folder, users=20, virtual_clients=4, groupings=1)
    return UserStore(folder)


def _client(*users):
    return SimpleNamespace(grouping=0, group=1, users=np.array(users, np.int64))


def test_client_examples_are_those_of_its_users(store):
    found = ClientLoader(store, config()).load(_client(3, 5))
    assert found.images.shape == (6, SIZE, SIZE, 1)
    assert set(found.labels) == {label for user in store.read([3, 5]) for label in user.labels}
    assert len(ClientLoader(store, config()).load(_client()).labels) == 0


def test_cache_is_bounded_in_bytes_and_keeps_what_was_used_last(store, monkeypatch):
    reads = []
    loader = ClientLoader(store, config(), cache_bytes=2 * 3 * SIZE * SIZE)
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
    found = ClientLoader(store, config(), classes=classes).load(_client(3))
    np.testing.assert_array_equal(classes[found.labels], store.read([3])[0].labels)


class _Packer:
    """Packs every client into a slab of its own."""

    def slabs(self, clients, number):
        for client in clients:
            yield (number, client.group)


def _feed(sample, loader, rounds=3):
    mechanism = SimpleNamespace(sample_clients=sample)
    return Feed(range(rounds), mechanism=mechanism, index=None, loader=loader, function=_Packer())


def test_feed_gives_rounds_in_order_and_stays_only_a_little_ahead():
    loaded = []
    loader = SimpleNamespace(load=lambda client: loaded.append(client.group) or client)
    feed = _feed(lambda n, _: [SimpleNamespace(group=g) for g in range(5)], loader)
    for number in range(3):
        for place, slab in enumerate(feed.next_round()):
            assert slab == (number, place)
            assert len(loaded) <= 5 * number + place + 5
    feed.close()


def test_error_while_loading_reaches_the_trainer():
    def fail(client):
        raise ArtifactError("a shard is damaged")

    feed = _feed(lambda n, _: [SimpleNamespace(group=0)], SimpleNamespace(load=fail))
    with pytest.raises(ArtifactError, match="damaged"):
        list(feed.next_round())
    feed.close()


def test_feed_stops_when_the_trainer_does():
    before = threading.active_count()
    feed = _feed(
        lambda n, _: [SimpleNamespace(group=g) for g in range(9)],
        SimpleNamespace(load=lambda client: client),
    )
    feed.close()
    assert threading.active_count() == before
