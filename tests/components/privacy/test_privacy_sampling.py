"""Samplers: coins first, users last."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fedemb.errors import PlanMismatch
from fedemb.privacy import sampling
from fedemb.privacy.noise import coin_threshold, coins, heads
from fedemb.privacy.sampling import ParticipationLog
from tests.kit.privacy_worlds import ROOT, World, make_plan

USERS = range(100, 200)


def sampled(plan, world, rounds=range(20), key=ROOT):
    """Per round, what each sampled virtual client holds, by user key."""
    sampler = plan.sampler(key)
    return [
        {
            (client.grouping, client.group): frozenset(world.user_keys[client.users].tolist())
            for client in sampler.sample(r, world)
        }
        for r in rounds
    ]


@settings(max_examples=25, deadline=None)
@given(users=st.sets(st.integers(0, 10_000), min_size=2, max_size=60), groupings=st.integers(1, 3))
@example(users=set(range(100, 160)), groupings=1)
@pytest.mark.parametrize("kind", ["group_poisson_gaussian", "not_private"])
def test_removing_a_user_changes_what_one_virtual_client_holds(kind, users, groupings):
    plan = make_plan(kind, groupings=groupings)
    gone = min(users)
    pairs = zip(
        sampled(plan, World(users, 40, groupings)),
        sampled(plan, World(users - {gone}, 40, groupings)),
        strict=True,
    )
    for there, without in pairs:
        assert there.keys() == without.keys()
        changed = [place for place in there if there[place] != without[place]]
        assert len(changed) <= 1
        assert all(there[place] == without[place] | {gone} for place in changed)


def test_coins_are_tossed_for_empty_virtual_clients_too():
    (with_users,) = sampled(make_plan(), World(USERS, 40), [3])
    (nobody,) = sampled(make_plan(), World([], 40), [3])
    assert with_users.keys() == nobody.keys()
    assert all(not members for members in nobody.values())


def test_round_r_uses_grouping_r_mod_groupings():
    plan = make_plan(groupings=3)
    for r, clients in enumerate(sampled(plan, World(USERS, 40, 3))):
        assert {grouping for grouping, _ in clients} <= {r % 3}


def test_same_key_same_clients_and_another_key_others():
    world, plan = World(USERS, 40), make_plan()
    assert sampled(plan, world) == sampled(plan, world)
    assert sampled(plan, world) != sampled(plan, world, key=bytes(32))


def test_cyclic_schedule_is_even_and_can_be_entered_anywhere():
    plan, world = make_plan("tree_aggregation"), World(USERS, 40)
    rounds = sampled(plan, world)
    places = [[group for _, group in clients] for clients in rounds]
    assert all(len(groups) == 8 for groups in places)
    for first, later in zip(places, places[5:], strict=False):
        assert first == later
    assert len({group for groups in places[:5] for group in groups}) == 40
    assert sampled(plan, world, [13]) == [rounds[13]]
    sampler = plan.sampler(ROOT)
    assert [c.group for c in sampler.sample(7, world)] == places[7]
    assert [c.group for c in sampler.sample(2, world)] == places[2]


def test_participation_log_refuses_too_often_too_soon_and_twice():
    plan = make_plan("tree_aggregation")

    def after(*rounds):
        log = ParticipationLog(plan)
        for r, groups in enumerate(rounds):
            log.record(r, np.array(groups))
        return log

    with pytest.raises(PlanMismatch, match="less than 5 rounds"):
        after([0], [1], [2], [3], [0])
    with pytest.raises(PlanMismatch, match="participated 4 times"):
        after(*([[r % 5] for r in range(20)]), [0])
    with pytest.raises(PlanMismatch, match="twice"):
        after([0, 0])
    with pytest.raises(PlanMismatch, match="in order"):
        after([0]).record(5, np.array([1]))


@pytest.mark.parametrize("kind", ["tree_aggregation"])
def test_schedule_that_breaks_the_separation_is_refused(monkeypatch, kind):
    """The price rests on the separation, so a fault of the schedule must not go unnoticed."""
    monkeypatch.setattr(
        sampling.RoundRobinSampler, "_scheduled", lambda self, number: np.arange(1, dtype=np.int64)
    )
    sampler = make_plan(kind).sampler(ROOT)
    world = World(USERS, 40)
    sampler.sample(0, world)
    with pytest.raises(PlanMismatch, match="less than"):
        sampler.sample(1, world)


@pytest.mark.parametrize("kind", ["group_poisson_gaussian", "tree_aggregation"])
def test_another_partition_or_an_unplanned_round_is_refused(kind):
    sampler = make_plan(kind).sampler(ROOT)
    with pytest.raises(PlanMismatch, match="virtual_clients=41"):
        sampler.sample(0, World(USERS, 41))
    with pytest.raises(PlanMismatch, match="groupings=2"):
        sampler.sample(0, World(USERS, 40, 2))
    for bad in (-1, 20):
        with pytest.raises(PlanMismatch, match="planned rounds"):
            sampler.sample(bad, World(USERS, 40))


def test_coin_threshold_never_exceeds_the_probability():
    assert coin_threshold(0.5) == 2**63
    assert coin_threshold(1.0) == 2**64
    assert coin_threshold(1e-30) == 0
    assert heads(coins(ROOT, 1000), 1.0).all()
    assert not heads(coins(ROOT, 1000), 1e-30).any()
    assert coin_threshold(0.1) / 2**64 <= 0.1


def test_more_units_or_images_than_a_sum_has_room_for_are_refused(monkeypatch):
    monkeypatch.setattr(sampling, "MOST_UNITS", 10)
    assert sampling.sample_units(0.5, ROOT, World(range(10), 4)) is not None
    assert sampling.sample_images(2, 0.5, ROOT, World(range(5), 4)) is not None
    with pytest.raises(PlanMismatch, match="more than 10 units"):
        sampling.sample_units(0.5, ROOT, World(range(11), 4))
    with pytest.raises(PlanMismatch, match="more than 10 images, 2 of each user"):
        sampling.sample_images(2, 0.5, ROOT, World(range(6), 4))


def test_the_two_words_of_a_user_are_independent():
    """One decides whether a user takes part in a round, the other in which virtual client."""
    one, other = sampling.user_words(ROOT, np.arange(20_000, dtype=np.uint64))
    halves = np.array([one >> np.uint64(63), other >> np.uint64(63)], np.float64)
    assert len(np.intersect1d(one, other)) == 0
    assert abs(np.corrcoef(halves)[0, 1]) < 0.04  # more than five standard deviations
