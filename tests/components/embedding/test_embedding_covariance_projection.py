"""The one-round projection on features of a frozen backbone, through the real mechanism."""

import keras
import numpy as np
import pytest

from fedemb.config import ServerConfig
from fedemb.errors import ConfigError
from fedemb.privacy.running import build_mechanism
from fedemb.training import initial_state, released_weights
from fedemb.training.feature_cache import plain_rows
from fedemb.training.heads import CovarianceFunction
from tests.kit.privacy_worlds import ROOT, make_plan

DIM, USERS = 12, 400


def _projection(width=DIM, bias=True):
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
    kernel, bias = state.weights[: DIM * DIM].reshape(DIM, DIM), state.weights[DIM * DIM :]
    return state, lambda features: features @ kernel + bias


def test_one_noised_round_gives_a_projection_that_tells_users_apart():
    """And noise that drowns the covariance gives little."""
    before = _nearest(lambda features: features)
    server = ServerConfig(ema_decay=0.9, ridge=0.25)
    state, embed = _trained(_function(), server)
    assert state.rounds == 1
    assert _nearest(embed) > 3 * before
    np.testing.assert_allclose(released_weights(server, state), state.weights, rtol=1e-5)
    assert _nearest(_trained(_function(1e4), server)[1]) < _nearest(embed) - 0.1


def test_leaving_a_user_out_moves_the_sum_by_at_most_the_clip_and_no_other_bit():
    function, units = _function(), [*_units(30)]
    start = function.initial_weights()

    def total(chosen):
        return np.asarray(function(start, chosen, 0).total)

    whole = total(units)
    np.testing.assert_array_equal(whole, total(units[::-1]))
    for place in (0, 17, 29):
        alone = total([units[place]])
        np.testing.assert_array_equal(whole - total(units[:place] + units[place + 1 :]), alone)
        assert 0 < np.linalg.norm(alone.astype(float)) <= 2.0**32


def test_users_without_images_contribute_nothing():
    function, units = _function(), [*_units(3)]
    empty = plain_rows(np.zeros((0, DIM), np.float32), np.zeros(0, int))
    found = function(function.initial_weights(), [*units, empty], 0)
    assert found.clients[:, 3].tolist() == [4, 4, 4]


@pytest.mark.parametrize("shape", [{"width": 8}, {"bias": False}])
def test_another_form_of_projection_is_refused(shape):
    mechanism = build_mechanism(make_plan("covariance"), ROOT, "run", 1, "0" * 64)
    with pytest.raises(ConfigError, match="embedding_dim: 12"):
        CovarianceFunction(_projection(**shape), mechanism)
