"""Samplers: coins first, users last."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fedemb.errors import PlanMismatch
from fedemb.privacy import sampling
from fedemb.privacy.noise import coin_threshold, coins, heads
from tests.kit.privacy_worlds import ROOT, World, make_plan

USERS = range(100, 200)


def sampled(plan, world, rounds=range(20), key=ROOT):
    """Per round, what each sampled virtual client holds, by user key."""
    return [
        {
            (client.grouping, client.group): frozenset(world.user_keys[client.users].tolist())
            for client in sampling.sample(plan, key, r, world)
        }
        for r in rounds
    ]


@settings(max_examples=25, deadline=None)
@given(users=st.sets(st.integers(0, 10_000), min_size=2, max_size=60), groupings=st.integers(1, 3))
@example(users=set(range(100, 160)), groupings=1)
def test_removing_a_user_changes_what_one_virtual_client_holds(users, groupings):
    plan = make_plan(groupings=groupings)
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


@pytest.mark.parametrize(
    "groups",
    [[[0], [1], [2], [3], [0]], [*([[r % 5] for r in range(20)]), [0]], [[0, 0]]],
    ids=["too soon", "too often", "twice"],
)
def test_turns_against_the_price_are_refused(groups):
    """The price rests on the separation, so a fault of the schedule must not go unnoticed."""
    plan = make_plan("tree_aggregation")
    assert (plan.min_separation, plan.max_participations) == (5, 4)
    sampling.check_turns(plan, np.array([[r % 5] for r in range(20)]))
    with pytest.raises(PlanMismatch, match="more than 4 times, or twice within 5 rounds"):
        sampling.check_turns(plan, np.array(groups))


@pytest.mark.parametrize("kind", ["group_poisson_gaussian", "tree_aggregation"])
def test_another_partition_or_an_unplanned_round_is_refused(kind):
    plan = make_plan(kind)
    with pytest.raises(PlanMismatch, match="virtual_clients=41"):
        sampling.sample(plan, ROOT, 0, World(USERS, 41))
    with pytest.raises(PlanMismatch, match="groupings=2"):
        sampling.sample(plan, ROOT, 0, World(USERS, 40, 2))
    for bad in (-1, 20):
        with pytest.raises(PlanMismatch, match="planned rounds"):
            sampling.sample(plan, ROOT, bad, World(USERS, 40))


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
