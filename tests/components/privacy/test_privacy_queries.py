"""Clip, sum and noise as the trainer calls them."""

import json
import math
from decimal import Decimal, localcontext

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fedemb.errors import ConfigError, PlanMismatch, Refused
from fedemb.keys import derive
from fedemb.privacy import noise, sampling
from fedemb.privacy.feature_sums import Features, clipped_product_sum, most_units
from fedemb.privacy.noise import coin_threshold, coins, heads
from tests.kit.privacy_worlds import KINDS, ROOT, World, make_plan

tf = pytest.importorskip("tensorflow")
queries = pytest.importorskip("fedemb.privacy.running")
MechanismQuery = pytest.importorskip("fedemb.privacy.dp_query").MechanismQuery

IDS = ("run", 0, "inputs")


def mechanism(plan=None, ids=IDS, root=ROOT, **changes):
    return queries.build_mechanism(plan or make_plan(**changes), root, *ids)


def contribution(m, *tensors):
    return m.record([tf.constant(t) for t in tensors])


def summed(*records):
    return sum(records[1:], records[0])


def grid_norm(record, plan) -> float:
    return float(np.linalg.norm(record.numpy().astype(np.float64))) * 2.0**-plan.grid_bits


# ---- clip ---------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(
        st.floats(allow_nan=True, allow_infinity=True, width=32), min_size=2, max_size=24
    ),
    clip=st.floats(1e-3, 1e3),
)
def test_no_record_contributes_more_than_the_clip(values, clip):
    m = mechanism(l2_norm_clip=clip)
    half = len(values) // 2
    record = contribution(m, np.float32(values[:half]), np.float32(values[half:]))
    assert grid_norm(record, m.plan) <= 1.0
    norm = math.sqrt(sum(float(v) ** 2 for v in values)) if all(map(math.isfinite, values)) else 0
    exact = np.array(values if norm else [0.0] * len(values)) / max(clip, norm)
    if np.isfinite(exact).all():
        np.testing.assert_allclose(record.numpy() * 2.0**-32, exact, atol=2.0**-25)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e300])
def test_a_non_finite_update_counts_as_zero(bad):
    m = mechanism()
    record = contribution(m, np.array([0.3, bad, 0.1]), np.ones((2, 2), np.float32))
    assert not record.numpy().any()


def test_clip_is_one_global_norm_over_all_tensors():
    m = mechanism()
    record = contribution(m, np.full((3, 3), 2.0, np.float32), np.full(16, 2.0, np.float16))
    assert record.dtype == tf.int64
    assert grid_norm(record, m.plan) == pytest.approx(1.0, rel=1e-6)


def test_quantisation_rounds_toward_zero():
    m = mechanism()
    record = contribution(m, np.array([0.7, -0.7]) * 2.0**-32).numpy()
    assert record.tolist() == [0, 0]
    record = contribution(m, np.array([1.7, -1.7]) * 2.0**-32).numpy()
    assert record.tolist() == [1, -1]


def test_clip_is_the_same_traced_and_eager_and_sums_have_no_order():
    m = mechanism()
    updates = [np.random.default_rng(i).normal(size=50).astype(np.float32) for i in range(9)]

    @tf.function
    def traced(update):
        return m.record([update])

    eager = [contribution(m, u) for u in updates]
    for record, update in zip(eager, updates, strict=True):
        np.testing.assert_array_equal(record, traced(update))
    forward, backward = summed(*eager), summed(*eager[::-1])
    np.testing.assert_array_equal(forward, backward)


# ---- noise --------------------------------------------------------------------------------------


def test_more_normals_than_the_sampler_is_accounted_for_are_refused(monkeypatch):
    m = mechanism()
    monkeypatch.setattr("fedemb.privacy.running.MAX_NORMALS", 2 * 20 * 10)
    m.aggregate(0, np.zeros(10, np.int64))
    with pytest.raises(PlanMismatch, match="normals"):
        m.aggregate(1, np.zeros(11, np.int64))


def test_key_labels_are_unambiguous():
    keys = {
        noise.run_key(ROOT, "noise", *ids)
        for ids in [("a", 11, "b"), ("a1", 1, "b"), ("a", 1, "1b")]
    }
    assert len(keys) == 3
    tags = {
        noise.round_tag(ROOT, r, np.array(v))
        for r, v in [(1, [0, 1]), (1, [1, 0]), (11, [0, 1]), (1, [0, 1, 0])]
    }
    assert len(tags) == 4
    assert noise.run_key(ROOT, "noise", *IDS) != noise.run_key(ROOT, "coins", *IDS)


def test_coins_and_noise_of_a_mechanism_have_keys_of_their_own():
    m = mechanism()
    assert m._coin_key == noise.run_key(ROOT, "coins", *IDS)
    assert m._noise_key == noise.run_key(ROOT, "noise", *IDS)


def test_noise_does_not_depend_on_threads(monkeypatch):
    size = 5 * noise._BLOCK + 17
    pooled = noise.gaussian(ROOT, size)
    rounded = noise.add_rounded_noise(np.zeros(size, np.int64), ROOT, 1e6)
    monkeypatch.setattr(noise, "_POOL_FROM", 10**12)
    np.testing.assert_array_equal(pooled, noise.gaussian(ROOT, size))
    np.testing.assert_array_equal(rounded, np.rint(noise.gaussian(ROOT, size) * 1e6))


def test_an_empty_round_is_noised_all_the_same():
    m = mechanism()
    out = m.aggregate(0, np.zeros(1000, np.int64))
    assert 0.8 < np.std(out.mean) * m.plan.normalizer < 1.2


@pytest.mark.parametrize(
    ("above", "distance"),
    [
        (above, distance)
        for above in (False, True)
        for distance in (1, 2, 3 << 62, (1 << 64) + 5, 5 << 72, 7 << 100, (1 << 127) - 9, 1 << 127)
    ],
)
def test_box_muller_radius_is_exact_near_both_ends_of_the_uniform(monkeypatch, above, distance):
    """An end is a distance of 2^-128 away at least; 1 - 2^-60 is not a number of float64."""
    word = 2**128 - distance if above else distance - 1
    words = [word >> 64, word & (2**64 - 1), 0]
    monkeypatch.setattr(
        noise, "_keystream", lambda *_: b"".join(w.to_bytes(8, "little") for w in words)
    )
    with localcontext(prec=60):
        uniform = Decimal(2**128 - distance if above else distance) / 2**128
        radius = (-2 * uniform.ln()).sqrt()
    assert noise.gaussian(ROOT, 1)[0] == pytest.approx(float(radius), rel=4e-16, abs=0.0)


# ---- correlated noise ---------------------------------------------------------------------------


def cumulative_noise(m, rounds, dim):
    outs = [m.aggregate(r, np.zeros(dim, np.int64)).mean for r in range(rounds)]
    return np.cumsum(np.array(outs, np.float64) * m.plan.normalizer, axis=0)


@pytest.mark.parametrize(("restart", "rounds"), [(0, 9), (4, 9), (5, 12)])
def test_tree_noise_has_the_covariance_of_its_nodes(restart, rounds):
    """Cov of prefix sums = number of shared nodes; 7 sigma bounds of a dim-4000 estimate."""
    m, dim = mechanism(make_plan("tree_aggregation", restart_every=restart)), 4000
    prefix = cumulative_noise(m, rounds, dim)

    def nodes(t):
        size, found, start = restart or 20, set(), 0
        while start + size <= t + 1:
            found |= {(start + s, b) for s, b in dyadic(size)}
            start += size
        return found | {(start + s, b) for s, b in dyadic(t + 1 - start)}

    def dyadic(length):
        start = 0
        for bit in reversed(range(length.bit_length())):
            if length >> bit & 1:
                yield start, bit
                start += 1 << bit

    for s in range(rounds):
        for t in range(s, rounds):
            shared = len(nodes(s) & nodes(t))
            spread = math.sqrt((len(nodes(s)) * len(nodes(t)) + shared**2) / dim)
            assert np.mean(prefix[s] * prefix[t]) == pytest.approx(shared, abs=7 * spread)


def test_tree_noise_is_exact_on_the_grid():
    """Prefix sums of whole numbers, so residuals of a completed pair cancel to the bit."""
    stream = noise.TreeStream(make_plan("tree_aggregation"), 100)
    rows = [stream.next(bytes([r]) * 32) for r in range(8)]
    fresh = noise.add_rounded_noise(
        np.zeros(100, np.int64), derive(bytes([0]) * 32, "node", "0"), 2.0**32
    )
    np.testing.assert_array_equal(rows[0], fresh)
    assert np.abs(np.sum(rows, axis=0)).max() < 2**36  # One node is left of eight leaves.


# ---- resuming -----------------------------------------------------------------------------------


def play(m, rounds, dim=60):
    outs = []
    for r in rounds:
        update = np.full(dim, 0.01 * (r + 1), np.float32)
        outs.append(m.aggregate(r, summed(contribution(m, update))).mean)
    return outs


PLANS = {kind: make_plan(kind) for kind in KINDS} | {
    "restarted tree": make_plan("tree_aggregation", restart_every=4)
}


@pytest.mark.parametrize("name", PLANS)
def test_a_resumed_run_equals_the_uninterrupted_one(name):
    plan = PLANS[name]
    rounds = min(9, plan.rounds)
    stop = min(5, rounds - 1)
    whole = play(mechanism(plan), range(rounds))
    first = mechanism(plan)
    play(first, range(stop))
    state = json.loads(json.dumps(first.state_to_json()))
    second = mechanism(plan)
    second.restore(state)
    np.testing.assert_array_equal(whole[stop:], play(second, range(stop, rounds)))


@pytest.mark.parametrize("name", PLANS)
def test_mechanism_state_contains_no_sums(name):
    """Sums enter the state through keyed tags only: no number of theirs."""
    m = mechanism(PLANS[name])
    play(m, range(min(3, m.plan.rounds)))
    state = m.state_to_json()
    assert state.keys() == {"schema", "plan", "next_round", "tag", "tags"}
    assert len(state["tags"]) == (3 if m.plan.tracks_participation else 0)
    assert all(len(tag) == 64 for tag in (state["tag"], *state["tags"]))


@pytest.mark.planted_bug(18)
def test_state_of_another_plan_or_with_a_gap_is_refused():
    m = mechanism(make_plan("tree_aggregation"))
    play(m, range(3))
    state = m.state_to_json()
    for bad in (
        {**state, "tags": state["tags"][:2]},
        {**state, "plan": "0" * 64},
        {**state, "schema": "other"},
        {},
    ):
        with pytest.raises(PlanMismatch):
            mechanism(make_plan("tree_aggregation")).restore(bad)


def test_state_without_its_round_is_refused():
    """Rounds that do not depend on each other have no tags that would be missed."""
    state = mechanism(make_plan()).state_to_json()
    assert state["next_round"] == 0
    for bad in ({**state, "next_round": -1}, {k: v for k, v in state.items() if k != "next_round"}):
        with pytest.raises(PlanMismatch):
            mechanism(make_plan()).restore(bad)


def test_an_unplanned_round_is_refused():
    for bad in (-1, 20):
        with pytest.raises(PlanMismatch, match="planned rounds"):
            play(mechanism(), [bad])


def test_keyless_mechanism_clips_alike_and_refuses_noise_and_sampling():
    """Other hosts have no keys: noise under a public key protects no user."""
    sound = mechanism()
    keyless, update = queries.KeylessMechanism(sound.plan), [np.full(4, 3.0)]
    found, wanted = (m.record(update) for m in (keyless, sound))
    np.testing.assert_array_equal(found, wanted)
    with pytest.raises(Refused, match="has no keys"):
        keyless.aggregate(0, np.zeros(4, np.int64))
    with pytest.raises(Refused, match="has no keys"):
        keyless.sample_clients(0, None)


@pytest.mark.parametrize(("images", "grid_bits"), [(1, 50), (1, 30), (2, 48), (3, 40), (8, 20)])
def test_units_of_an_exact_sum_are_as_many_as_float64_holds(images, grid_bits):
    """A sum above 2^52 would be rounded, and then depends on the order of the users."""
    most = most_units(images, grid_bits)
    assert most * images**2 * 2**grid_bits <= 2**52 < (most + 1) * images**2 * 2**grid_bits
    with pytest.raises(ConfigError, match="too large for an exact sum"):
        most_units(2, 53)


@pytest.mark.parametrize("more", [1, 2, 5])
def test_more_units_than_an_exact_sum_holds_are_refused(more):
    units = most_units(2, 48) + more
    features = Features(np.ones((units, 2, 3), np.int16), np.ones((units, 2)))
    with pytest.raises(ValueError, match="exceed the capacity of one exact sum"):
        clipped_product_sum(features, np.ones((units, 2, 4)), l2_norm_clip=1.0, grid_bits=48)


def test_mechanism_query_follows_the_dp_query_protocol():
    """The numbered steps of `dp_query.DPQuery`; TensorFlow sums records in them."""
    m, update = mechanism(), [tf.constant([0.1, 0.2, 0.3])]
    query = MechanismQuery(m)
    state = query.initial_global_state()
    params, sums = query.derive_sample_params(state), tf.zeros(3, tf.int64)
    for _ in range(4):
        sums = query.accumulate_record(params, sums, update)
    result, state, event = query.get_noised_result(query.merge_sample_states(sums, sums), state)
    assert (int(state), event) == (1, m.plan.round_event)
    assert result.dtype == tf.float32, "a float64 shows which values its normals can have"
    wanted = mechanism().aggregate(0, 2 * np.asarray(sums)).mean
    np.testing.assert_array_equal(result.numpy(), wanted)


def test_clipped_sums_match_tensorflow_privacy():
    """tensorflow-privacy's GaussianSumQuery without noise is the oracle; it never noises for us."""
    from tensorflow_privacy.privacy.dp_query import gaussian_query

    stock, query = gaussian_query.GaussianSumQuery(1.0, 0.0), MechanismQuery(mechanism())
    updates = [np.random.default_rng(i).normal(size=30).astype(np.float32) / 5 for i in range(8)]
    theirs, ours = stock.initial_sample_state([tf.zeros(30)]), tf.zeros(30, tf.int64)
    for update in map(tf.constant, updates):
        theirs = stock.accumulate_record(tf.constant(1.0), theirs, [update])
        ours = query.accumulate_record((), ours, [update])
    np.testing.assert_allclose(ours.numpy() * 2.0**-32, theirs[0].numpy(), atol=1e-5)


# ---- Samplers: coins first, users last ----


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


def test_sampled_clients_depend_on_the_key_only():
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
def test_participations_beyond_the_accounted_limits_are_refused(groups):
    """The price rests on the separation, so a fault of the schedule must not go unnoticed."""
    plan = make_plan("tree_aggregation")
    assert (plan.min_separation, plan.max_participations) == (5, 4)
    sampling.check_participations(plan, np.array([[r % 5] for r in range(20)]))
    with pytest.raises(PlanMismatch, match="more than 4 times, or twice within 5 rounds"):
        sampling.check_participations(plan, np.array(groups))


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


def test_units_beyond_the_exact_sum_are_refused(monkeypatch):
    monkeypatch.setattr(sampling, "MOST_UNITS", 10)
    assert sampling.sample_units(0.5, ROOT, World(range(10), 4)) is not None
    assert sampling.sample_images(2, 0.5, ROOT, World(range(5), 4)) is not None
    with pytest.raises(PlanMismatch, match="more than 10 units"):
        sampling.sample_units(0.5, ROOT, World(range(11), 4))
    with pytest.raises(PlanMismatch, match="more than 10 images, 2 of each user"):
        sampling.sample_images(2, 0.5, ROOT, World(range(6), 4))
