"""Virtual clients are made a little ahead of the training that uses them."""

import threading
from types import SimpleNamespace

import pytest

from fedemb.engine.rounds import Feed
from fedemb.errors import ArtifactError


class _Packer:
    """Packs every client into a slab of its own."""

    def slabs(self, clients, number):
        for client in clients:
            yield (number, client.group)


def _feed(sample, load, rounds=3):
    mechanism = SimpleNamespace(sample_clients=sample, plan=SimpleNamespace(rounds=rounds))
    return Feed(_Packer(), mechanism, first=0, index=None, load=load)


def test_feed_gives_rounds_in_order_and_stays_only_a_little_ahead():
    loaded = []
    clients = [SimpleNamespace(group=g) for g in range(5)]
    load = lambda client: loaded.append(client.group) or client  # noqa: E731
    with _feed(lambda n, _: clients, load) as feed:
        for number in range(3):
            for place, slab in enumerate(feed.next_round()):
                assert slab == (number, place)
                assert len(loaded) <= 5 * number + place + 5


def test_error_while_loading_reaches_the_trainer():
    def fail(client):
        raise ArtifactError("a shard is damaged")

    with (
        _feed(lambda n, _: [SimpleNamespace(group=0)], fail) as feed,
        pytest.raises(ArtifactError, match="damaged"),
    ):
        list(feed.next_round())


def test_all_clients_of_a_round_are_prepared_before_one_is_loaded():
    seen = []
    clients = [SimpleNamespace(group=g) for g in range(3)]

    def load(client):
        seen.append(client.group)
        return client

    mechanism = SimpleNamespace(sample_clients=lambda *_: clients, plan=SimpleNamespace(rounds=1))
    prepare = lambda round_clients: seen.append(len(round_clients))  # noqa: E731
    with Feed(_Packer(), mechanism, first=0, index=None, load=load, prepare=prepare) as feed:
        list(feed.next_round())
    assert seen == [3, 0, 1, 2]


def test_feed_stops_when_the_trainer_does():
    before = threading.active_count()
    clients = [SimpleNamespace(group=g) for g in range(9)]
    with _feed(lambda n, _: clients, lambda client: client):
        assert threading.active_count() == before + 1
    assert threading.active_count() == before
