"""Virtual clients are made a little ahead of the training that uses them; no round is left out."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest

from fedemb.config import ServerConfig
from fedemb.errors import ArtifactError
from fedemb.privacy.running import build_mechanism
from fedemb.training.rounds import Feed, RoundSums, TrainingRound, run_rounds
from fedemb.training.server import initial_state
from tests.kit.privacy_worlds import ROOT, World, make_plan


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


class _Nobody(TrainingRound):
    """Rounds whose virtual clients have no examples."""

    def initial_weights(self):
        return np.zeros(self.dim, np.float32)

    def slabs(self, units, round_index):
        return iter(() if all(len(unit.users) == 0 for unit in units) else (1,))

    def _sums(self, weights, slabs):
        assert not list(slabs)
        return RoundSums(np.zeros(self.dim, np.int64), np.zeros((0, 4), np.float32))


@pytest.mark.planted_bug(12)
def test_a_round_without_participants_is_noised_and_committed_like_any_other():
    """Left out, it would show that nobody was sampled."""
    plan, committed = make_plan(), []
    mechanism = build_mechanism(plan, ROOT, "run", 0, "inputs")
    function, world = _Nobody(mechanism, 5), World((), plan.virtual_clients)
    state, load = initial_state(function.initial_weights()), lambda client: client
    commit = lambda number, output: committed.append((number, output))  # noqa: E731
    with Feed(function, mechanism, first=0, index=world, load=load) as feed:
        rounds = list(run_rounds(function, mechanism, ServerConfig(), state, feed, commit=commit))
    assert [number for number, _ in committed] == list(range(plan.rounds))
    assert all(output.mean.all() for _, output in committed)
    assert rounds[-1].state.rounds == plan.rounds
