"""Warnings of a plan about its noise."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedemb.errors import PlanMismatch
from fedemb.pipelines.run.load_config import load_config
from fedemb.privacy import noise
from fedemb.privacy.planning import project
from fedemb.privacy.registry import plan_mechanism
from fedemb.privacy.running import build_mechanism
from fedemb.privacy.sampling import user_words
from fedemb.training.noise_warnings import (
    WARNED_FROM,
    forecast,
    measured_runs,
    training_noise,
    warnings,
)
from tests.kit.privacy_worlds import KINDS, ROOT, make_plan


def with_noise(preset: str, noise: float, **settings: object):
    """A preset whose noise, in the unit of `measured_runs`, is `noise`."""
    config = load_config(preset).updated(settings)
    found = training_noise(config, plan_mechanism(config))
    assert found is not None
    multiplier = config.mechanism.noise_multiplier * noise / found[1]
    return config.updated({"mechanism.noise_multiplier": multiplier})


@pytest.mark.parametrize(
    ("preset", "recipe"), [("quickstart", "whole_net"), ("cifar10_scatter", "head")]
)
def test_plan_warns_of_noise_far_above_that_of_every_measured_run(preset, recipe):
    limit = WARNED_FROM * max(run.noise for run in measured_runs()[recipe])
    assert "noise_above_measured" not in warnings(with_noise(preset, 0.99 * limit))
    assert "noise_above_measured" in warnings(with_noise(preset, 1.01 * limit))


@pytest.mark.parametrize(
    ("preset", "noise", "named"),
    [
        ("cars_whitening", 0.0004, "car photos at noise 0.0003: +9.7 points"),
        ("cars_whitening", 0.025, "car photos at noise 0.03: +1.1 points [0.4, 1.9] at 1 in 100"),
        ("quickstart", 0.0046, "generated glyphs at noise 0.0046: +10.9"),
    ],
)
def test_forecast_names_the_measured_runs_of_the_same_training_at_the_nearest_noise(
    preset, noise, named
):
    text = forecast(with_noise(preset, noise))
    assert f"Measured with this kind of training: {named}" in text
    assert text.count("car photos") == (preset == "cars_whitening")
    assert "None for this kind" in forecast(load_config("dp_sgd_quickstart"))


def test_noise_warning_limit_is_higher_for_projection_training():
    config = with_noise("quickstart", 0.1)
    projection = config.updated({"model.trainable": "projection"})
    assert "noise_above_measured" in warnings(config)
    assert "noise_above_measured" not in warnings(projection)


def test_noise_of_a_classifier_counts_weights_and_rounds():
    """The length of the noise on the mean gradient of the whole training."""
    config = load_config("cifar10_scatter")
    plan = plan_mechanism(config)
    found = training_noise(config, plan)
    assert found is not None
    weights = (config.model.embedding_dim + 1) * len(config.model.classes)
    per_round = plan.noise_multiplier / plan.normalizer * math.sqrt(weights)
    assert found[1] == pytest.approx(per_round / math.sqrt(plan.rounds))


# ---- Noise, coins and tags far into their range: what a test of the first values cannot see ----


KEY = bytes(range(32))
POWERS = sorted({n for k in range(25) for n in (2**k - 1, 2**k, 2**k + 1)})
"""Numbers of blocks: a run has at most 2^24, of 2^16 normals each."""


def mechanism(plan, root=ROOT):
    return build_mechanism(plan, root, "run", 0, "inputs")


# Noise


def block(number, size=8):
    """The normals of one block, as `add_rounded_noise` and `gaussian` fill it."""
    out = np.empty(size)
    noise._box_muller(KEY, number, out)
    return tuple(out)


def test_distant_blocks_of_noise_share_no_value():
    """A block number that is cut to a byte, or to 16 or 20 bits, repeats the noise."""
    assert noise.MAX_NORMALS // noise._BLOCK == 2**24
    values = [value for number in POWERS for value in block(number)]
    assert len(set(values)) == len(values)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**40), st.integers(0, 63))
def test_each_bit_of_a_block_number_changes_the_noise(number, bit):
    assert not set(block(number)) & set(block(number ^ (1 << bit)))


@pytest.mark.long
@pytest.mark.parametrize("values", ["gaussian", "add_rounded_noise"])
def test_noise_of_many_blocks_never_repeats(monkeypatch, values):
    """70,000 blocks of two: the counter of blocks passes 2^16, as that of 2^32 normals does."""
    monkeypatch.setattr(noise, "_BLOCK", 2)
    monkeypatch.setattr(noise, "_POOL_FROM", 1 << 40)
    size = 140_000
    if values == "gaussian":
        drawn = noise.gaussian(KEY, size)
    else:
        drawn = noise.add_rounded_noise(np.zeros(size, np.int64), KEY, 2.0**50)
    assert len(np.unique(drawn)) == size


def test_noise_of_whole_blocks_does_not_repeat_after_a_million_values():
    """With the length of block that runs use; seventeen of them."""
    size = 17 * noise._BLOCK
    drawn = noise.gaussian(KEY, size).reshape(17, -1)
    assert len(np.unique(drawn)) == size
    added = noise.add_rounded_noise(np.zeros(size, np.int64), KEY, 2.0**50).reshape(17, -1)
    assert len(np.unique(added[:, :1000])) == 17_000


# Coins


@pytest.mark.parametrize("words", ["coins", "user_words"])
def test_every_bit_of_a_coin_is_fair(words):
    """Of 8,192 words each of 64 bits is set in half of them, to six standard deviations."""
    count = 1 << 13
    if words == "coins":
        drawn = noise.coins(KEY, count)
    else:
        drawn = user_words(KEY, np.arange(count, dtype=np.uint64))
    bits = (drawn[:, None] >> np.arange(64, dtype=np.uint64)) & np.uint64(1)
    assert np.abs(bits.sum(axis=0) / count - 0.5).max() < 6 * 0.5 / count**0.5
    assert len(np.unique(drawn)) == count


@settings(max_examples=200, deadline=None)
@given(st.floats(2.0**-60, 1.0, exclude_max=True))
def test_coin_is_true_for_words_below_the_threshold(probability):
    threshold = noise.coin_threshold(probability)
    words = [0, threshold - 1, threshold, threshold + 1, 2**64 - 1]
    wanted = [word < threshold for word in words]
    assert noise.heads(np.array(words, np.uint64), probability).tolist() == wanted


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**64 - 1), st.integers(0, 63))
def test_each_bit_of_a_user_key_changes_its_random_word(user, bit):
    coin, other = user_words(KEY, np.array([user, user ^ (1 << bit)], np.uint64))
    assert coin != other


# The tag of a round


@pytest.mark.parametrize("entry", [0, 999, 1_000, 1_024, 65_535, 65_536, 99_999])
def test_every_entry_of_the_sum_is_bound_into_the_tag(entry):
    """Equal tags of unequal sums mean equal noise: subtracting the outputs removes it."""
    sums = np.zeros(100_000, np.int64)
    before = noise.round_tag(KEY, 0, sums)
    for change in (1, 1 << 40):
        moved = sums.copy()
        moved[entry] += change
        assert noise.round_tag(KEY, 0, moved) != before


def test_length_of_a_sum_is_bound_into_the_tag():
    tags = {noise.round_tag(KEY, 0, np.zeros(n, np.int64)) for n in (1, 2, 4_096)}
    assert len(tags) == 3


@pytest.mark.parametrize("kind", KINDS)
def test_noise_of_a_round_changes_with_the_last_entry_of_its_sum(kind):
    plan, dim = make_plan(kind), 5_000
    if not plan.private:
        pytest.skip("this mechanism adds no noise")
    empty = np.zeros(dim, np.int64)
    moved = empty.copy()
    moved[-1] = 1
    means = [
        mechanism(plan).aggregate(0, sums).mean[:1_000].astype(float) for sums in (empty, moved)
    ]
    assert abs(np.corrcoef(*means)[0, 1]) < 6 / 1_000**0.5


# Rounds that depend on each other


ORDERED = {
    "tree_aggregation": make_plan("tree_aggregation"),
    "restarted tree": make_plan("tree_aggregation", restart_every=4),
}


@pytest.mark.parametrize("name", ORDERED)
@pytest.mark.parametrize("again", [0, 1, 2])
def test_repeating_a_round_of_tree_aggregation_is_refused(name, again):
    """A repeated round would add the noise of a later row to an earlier sum."""
    m = mechanism(ORDERED[name])
    for index in range(3):
        m.aggregate(index, np.zeros(8, np.int64))
    with pytest.raises(PlanMismatch, match=f"^Round {again} is not the next round, 3"):
        m.aggregate(again, np.zeros(8, np.int64))


def test_independent_round_may_be_repeated_with_identical_output():
    m = mechanism(make_plan())
    first, _, again = (m.aggregate(index, np.zeros(8, np.int64)) for index in (0, 1, 0))
    np.testing.assert_array_equal(first.mean, again.mean)


def test_sampler_stops_at_its_accounted_number_of_values():
    plan = make_plan(rounds=4)
    limit = noise.MAX_NORMALS // (2 * plan.rounds)
    source = mechanism(plan)
    source.require_drawable(limit)
    with pytest.raises(PlanMismatch, match="noise sampler is accounted for"):
        source.require_drawable(limit + 1)


# Projections


@pytest.mark.parametrize("population", [2_000, 100_000, 10_000_000])
def test_delta_of_a_projection_is_below_one_over_its_population(population):
    """Also where the given delta was below that at the population of the simulation."""
    plan = make_plan(rounds=2)
    for delta in (None, 1e-3, 1 / population, 2 / population, 9.9 / population):
        found = project(plan, 1_000, population, delta)
        assert found.delta == population**-1.1 < 1 / population
    small = 0.5 / population
    assert project(plan, 1_000, population, small).delta == small
