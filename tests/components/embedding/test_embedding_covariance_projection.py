"""The one-round projection on features of a frozen backbone, through the real mechanism."""

from dataclasses import replace

import keras
import numpy as np
import pytest

from fedemb.config import ModelConfig, ServerConfig, UnitGradientConfig
from fedemb.errors import ConfigError
from fedemb.models.backbones import build_backbone
from fedemb.privacy.running import build_mechanism
from fedemb.training.feature_cache import plain_rows, rows_of
from fedemb.training.heads import CovarianceFunction, HeadGradientFunction
from fedemb.training.server import initial_state, released_weights
from tests.kit.privacy_worlds import ROOT, make_plan

DIM, USERS = 12, 400


def _projection(width=DIM, bias=False):
    inputs = keras.Input((DIM,))
    return keras.Model(inputs, keras.layers.Dense(width, use_bias=bias, name="embedding")(inputs))


def _function(noise=1.0, users=USERS):
    plan = make_plan("covariance", noise_multiplier=noise, units_per_round=users)
    return CovarianceFunction(_projection(), build_mechanism(plan, ROOT, "run", 1, "0" * 64))


def _units(count):
    """Users with four photos each; four of the features say nothing about the user."""
    random = np.random.default_rng(0)
    for user in range(count):
        features = 0.15 * random.normal(size=(1, DIM)) + 0.05 * random.normal(size=(4, DIM))
        features[:, :4] += random.normal(size=(4, 4)) + 1.0
        features /= np.linalg.norm(features, axis=1, keepdims=True)
        yield plain_rows(features.astype(np.float32), np.full(4, user))


def _nearest(embed, count=100):
    """Share of the photos whose nearest other photo is of the same user."""
    rows = np.concatenate([*_units(count)])
    found = embed(rows["features"])
    found = found / np.linalg.norm(found, axis=1, keepdims=True)
    alike = found @ found.T
    np.fill_diagonal(alike, -2.0)
    return np.mean(rows["label"][alike.argmax(1)] == rows["label"])


def _trained(function, server):
    state = initial_state(function.initial_weights())
    sums = function(state.weights, _units(USERS), 0)
    output = function.mechanism.aggregate(0, sums.total)
    state = function.advance(server, state, output.mean)
    return state, lambda features: features @ state.weights.reshape(DIM, DIM)


def test_one_noised_round_improves_nearest_neighbour_accuracy():
    """And noise that drowns the covariance gives little."""
    before = _nearest(lambda features: features)
    server = ServerConfig(ema_decay=0.9, ridge=0.25)
    state, embed = _trained(_function(), server)
    assert state.rounds == 1
    assert _nearest(embed) > 3 * before
    np.testing.assert_allclose(released_weights(server, state), state.weights, rtol=1e-5)
    assert _nearest(_trained(_function(1e4), server)[1]) < _nearest(embed) - 0.1


def _lengths(function, weights, units, round_index=0):
    """Length of each unit's record: leaving it out moves the sum by it, and no other bit."""

    def total(chosen):
        return np.asarray(function(weights, chosen, round_index).total)

    whole = total(units)
    np.testing.assert_array_equal(whole, total(units[::-1]))
    function._chunk = 7  # other products, the same bits
    for place in range(len(units)):
        alone = total([units[place]])
        np.testing.assert_array_equal(whole - total(units[:place] + units[place + 1 :]), alone)
        yield np.linalg.norm(alone.astype(float))


@pytest.mark.parametrize("kind", ["user", "unit"])
def test_removing_one_unit_changes_the_sum_by_exactly_its_clipped_record(kind):
    kinds = {"user": (_function, _units), "unit": (_head, _units_of_head)}
    function, units = kinds[kind][0](), [*kinds[kind][1](40)]
    lengths = _lengths(function, function.initial_weights(), units)
    assert all(0 < length <= 2.0**32 for length in lengths)


def test_users_without_images_contribute_nothing():
    function, units = _function(), [*_units(3)]
    empty = plain_rows(np.zeros((0, DIM), np.float32), np.zeros(0, int))
    found = function(function.initial_weights(), [*units, empty], 0)
    assert found.clients[:, 3].tolist() == [4, 4, 4]


@pytest.mark.parametrize("shape", [{"width": 8}, {"bias": True}])
def test_projection_of_wrong_width_or_with_a_bias_is_refused(shape):
    mechanism = build_mechanism(make_plan("covariance"), ROOT, "run", 1, "0" * 64)
    with pytest.raises(ConfigError, match="embedding_dim: 12"):
        CovarianceFunction(_projection(**shape), mechanism)


# ---- The last round of a head, which measures its temperature ----


CLASSES = 4
MODEL = ModelConfig(backbone="tiny", image_size=12, embedding_dim=16, classes=("a", "b", "c", "d"))


def _head(noise=1.0):
    plan = make_plan("poisson_gaussian", noise_multiplier=noise, units_per_round=2000)
    mechanism = build_mechanism(plan, ROOT, "run", 1, "0" * 64)
    config = UnitGradientConfig(images_per_unit=3)
    return HeadGradientFunction(build_backbone(MODEL, 1), mechanism, config)


def _units_of_head(count):
    """Units of one to three images whose features lean towards their label."""
    random = np.random.default_rng(0)
    found = []
    for unit in range(count):
        labels = random.integers(0, CLASSES, 1 + unit % 3)
        features = random.normal(size=(len(labels), 16)) + 3.0 * np.eye(16)[labels]
        found.append(rows_of(features.astype(np.float32), labels))
    return found


def _certainty(weights, units):
    """Returns mean probability of the first class, and accuracy."""
    kernel, bias = weights[:-CLASSES].reshape(16, CLASSES), weights[-CLASSES:]
    rows = np.concatenate(units)
    logits = rows["mantissas"][:, :-1] / rows["scale"][:, None] @ kernel + bias
    powers = np.exp(logits - logits.max(1, keepdims=True))
    largest = (powers / powers.sum(1, keepdims=True)).max(1)
    return largest.mean(), (logits.argmax(1) == rows["label"]).mean()


@pytest.mark.parametrize("before", [0.3, 1.0, 4.0], ids=["unsure", "right", "too certain"])
def test_temperature_round_calibrates_mean_probability_to_accuracy(before):
    function, units, server = _head(), _units_of_head(2000), ServerConfig()
    head = np.vstack([3 * before * np.eye(16, CLASSES), np.full((1, CLASSES), 0.1)])
    last = function.mechanism.plan.rounds - 1
    state = replace(initial_state(head.astype(np.float32).ravel()), rounds=last)
    output = function.mechanism.aggregate(last, function(state.weights, units, last).total)
    after = function.advance(server, state, output.mean)
    weights = released_weights(server, after)
    certain, right = _certainty(weights, units)
    assert after.rounds == last + 1
    assert certain == pytest.approx(right, abs=0.03)
    kept = state.weights != 0
    scale = weights[kept] / state.weights[kept]
    np.testing.assert_allclose(scale, scale[0], rtol=1e-5)  # the order of classes stays


def test_temperature_record_of_a_unit_is_clipped_and_fully_noised():
    function, units = _head(noise=5.0), _units_of_head(40)
    last, plan = function.mechanism.plan.rounds - 1, function.mechanism.plan
    weights = 1e3 * np.random.default_rng(0).normal(size=len(function.initial_weights()))
    weights = weights.astype(np.float32)  # so certain that records have their largest norm
    lengths = _lengths(function, weights, units, last)
    assert 0.99 < max(lengths) / 2.0**plan.grid_bits <= 1.0
    assert not np.any(function(np.full_like(weights, np.nan), units, last).total)
    noise = function.mechanism.aggregate(last, np.zeros(function.dim, np.int64)).mean
    assert noise.std() * plan.normalizer / plan.l2_norm_clip == pytest.approx(5.0, rel=0.3)


def test_empty_units_add_nothing_and_images_past_the_cap_are_dropped():
    function, units = _head(), _units_of_head(3)
    empty = rows_of(np.zeros((0, 16), np.float32), np.zeros(0, int))
    start = function.initial_weights()
    with_empty = function(start, [*units, empty], 0)
    assert with_empty.clients[:, 3].tolist() == [1, 2, 3]
    many = rows_of(np.ones((9, 16), np.float32), np.zeros(9, int))
    first = rows_of(np.ones((3, 16), np.float32), np.zeros(3, int))
    sums = [np.asarray(function(start, [unit], 0).total) for unit in (many, first)]
    np.testing.assert_array_equal(*sums)
