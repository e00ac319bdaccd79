"""The layers of tests/planted_bugs/README.md on the real parts of a round.

Many planted bugs must turn one of them red.
"""

import copy
import math
from unittest import mock

import numpy as np
import pytest
from scipy.stats import chi2

from fedemb.privacy import running
from fedemb.privacy.running import build_mechanism
from tests.kit.privacy_worlds import World, make_plan

TARGET = 1_000
USERS = frozenset(range(120))
SHAPES = ((6, 4), (16,))
DIM, MANY = 40, 20_000
INJECTED_TAG = b"the same noise in both worlds..."
PLAN = make_plan(rounds=400, noise_multiplier=2.0, virtual_clients=30, sampling_probability=0.4)


def _mechanism(first=0):
    return build_mechanism(PLAN, bytes(range(first, first + 32)), "run", 0, "inputs")


def _update(users, round_index):
    """Ten clips long, and its sign flips with the target: the worst a virtual client can do."""
    sign = -1.0 if TARGET in users else 1.0
    rng = np.random.default_rng([round_index, len(users) - (TARGET in users)])
    flat = rng.normal(size=DIM)
    flat *= sign * 10 / np.linalg.norm(flat)
    split = np.split(flat, [math.prod(SHAPES[0])])
    return [part.reshape(shape) for part, shape in zip(split, SHAPES, strict=True)]


def _play(users):
    """Twelve rounds with the same noise in every world: contributions, sum, noise and mean."""
    m, drawn, sound = _mechanism(), [], running.add_rounded_noise

    def add(values, key, scale):
        out = sound(values, key, scale)
        drawn.append(out - values)
        return out

    injected = {"round_tag": lambda *_: INJECTED_TAG, "add_rounded_noise": add}
    world = World(users, PLAN.virtual_clients)
    for r in range(12):
        state, contributions = np.zeros(DIM, np.int64), {}
        for client in m.sample_clients(r, world):
            members = tuple(int(key) for key in world.user_keys[client.users])
            record = np.asarray(m.record(_update(members, r)))
            contributions[client.grouping, client.group] = record
            state = state + record
        total = state.copy()
        with mock.patch.multiple(running, **injected):
            mean = m.aggregate(r, state).mean.astype(np.float64)
        yield contributions, total, mean, drawn.pop()


@pytest.mark.planted_bug
def test_neighbouring_data_differ_by_one_clipped_record_and_not_in_noise():
    """The same rounds on neighbouring data sets; nothing statistical."""
    grid, clip, moved = 2.0**PLAN.grid_bits, 1 + 1e-6, 0
    for there, gone in zip(_play(USERS | {TARGET}), _play(USERS), strict=True):
        for contributions, *_ in (there, gone):
            assert all(np.linalg.norm(v / grid) <= clip for v in contributions.values())
        assert there[0].keys() == gone[0].keys(), "other virtual clients were sampled"
        changed = [k for k in there[0] if not np.array_equal(there[0][k], gone[0][k])]
        moved += len(changed)
        assert len(changed) <= 1, "the target moved several virtual clients"
        assert np.linalg.norm((there[1] - gone[1]) / grid) <= 2 * clip
        assert np.array_equal(there[3], gone[3]), "the noise follows the data, not the key"
        step = np.linalg.norm(there[2] - gone[2]) * PLAN.normalizer
        assert step <= 2 * (1 + 1e-4), "the mean moved by more than twice the clip"
    assert moved, "the target never took part: this test saw nothing"


@pytest.mark.planted_bug
def test_noise_of_zero_input_has_the_scale_and_is_independent():
    """Zero input: scale, independence of rounds and of processes. 6 sigma: 2e-9 a line."""
    rows = (
        np.array(
            [
                m.aggregate(r, np.zeros(MANY, np.int64)).mean
                for m in (_mechanism(), _mechanism(1))
                for r in range(4)
            ],
            np.float64,
        )
        * PLAN.normalizer
    )
    target = PLAN.noise_multiplier * PLAN.l2_norm_clip
    assert (np.abs(rows.std(axis=1) / target - 1) < 6 / math.sqrt(2 * MANY)).all()
    correlations = np.corrcoef(rows) - np.eye(len(rows))
    assert np.abs(correlations).max() < 6 / math.sqrt(MANY), "rounds or processes are correlated"
    shifted = np.abs(np.mean(rows[:, 1:] * rows[:, :-1], axis=1)) / target**2
    assert shifted.max() < 6 / math.sqrt(MANY - 1), "neighbouring entries are correlated"


@pytest.mark.planted_bug
def test_noise_differs_for_other_sums_and_repeats_for_equal_sums():
    """The same round again with other sums must not get the same noise; with equal ones it must."""
    state = np.zeros(MANY, np.int64)
    other = state + 1
    one, two, same = (
        _mechanism().aggregate(0, s).mean.astype(np.float64)
        for s in (state, other, copy.deepcopy(state))
    )
    assert abs(np.corrcoef(one, two)[0, 1]) < 6 / math.sqrt(MANY), "subtracting cancels the noise"
    assert np.array_equal(one, same), "averaging replays removes the noise"


@pytest.mark.planted_bug
def test_sampling_is_binomial_and_independent_between_rounds():
    """Sizes of rounds against Binomial(G, q), and repeats in the next round, both at 1e-6."""
    q, groups, rounds, m = PLAN.sampling_probability, PLAN.virtual_clients, 300, _mechanism()
    world, table = World(USERS, groups), np.zeros((rounds, groups))
    for r in range(rounds):
        table[r, [client.group for client in m.sample_clients(r, world)]] = 1
    statistic = ((table.sum(axis=1) - groups * q) ** 2).sum() / (groups * q * (1 - q))
    tail = chi2.sf(statistic, rounds)
    assert 2 * min(tail, 1 - tail) > 1e-6, "sizes of rounds are not binomial"
    centred = table - q
    repeats = (centred[1:] * centred[:-1]).sum() / (q * (1 - q))
    assert abs(repeats) < 5 * math.sqrt(groups * (rounds - 1)), "rounds depend on the one before"
