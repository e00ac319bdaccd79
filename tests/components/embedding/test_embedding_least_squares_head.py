"""The one-round head on features of a frozen backbone, through the real mechanism."""

import numpy as np
import pytest

from fedemb.config import ModelConfig, ServerConfig, UnitGradientConfig
from fedemb.privacy.running import build_mechanism
from fedemb.training import build_backbone, initial_state, released_weights
from fedemb.training.feature_cache import rows_of
from fedemb.training.heads import LeastSquaresFunction
from tests.kit.privacy_worlds import ROOT, make_plan

CLASSES = 4
MODEL = ModelConfig(backbone="tiny", image_size=12, embedding_dim=16, classes=("a", "b", "c", "d"))


def _function(noise=1.0, units=2000):
    classifier = build_backbone(MODEL, 1)
    plan = make_plan("least_squares", noise_multiplier=noise, units_per_round=units)
    mechanism = build_mechanism(plan, ROOT, "run", 1, "0" * 64)
    return LeastSquaresFunction(classifier, mechanism, UnitGradientConfig(images_per_unit=3))


def _units(count):
    """Units of one to three images whose features lean towards their label."""
    random = np.random.default_rng(0)
    found = []
    for unit in range(count):
        labels = random.integers(0, CLASSES, 1 + unit % 3)
        features = random.normal(size=(len(labels), 16)) + 3.0 * np.eye(16)[labels]
        found.append(rows_of(features.astype(np.float32), labels))
    return found


def _accuracy(weights, units):
    kernel, bias = weights[:-CLASSES].reshape(16, CLASSES), weights[-CLASSES:]
    hits = []
    for unit in units:
        logits = unit["mantissas"][:, :-1] / unit["scale"][:, None] @ kernel + bias
        hits.extend(logits.argmax(1) == unit["label"])
    return np.mean(hits)


@pytest.mark.parametrize(("noise", "low", "high"), [(1.0, 0.85, 1.0), (3000.0, 0.0, 0.6)])
def test_one_noised_round_gives_the_head(noise, low, high):
    """And noise that drowns the moments drowns the head too."""
    function, server = _function(noise), ServerConfig(ema_decay=0.9)
    units = _units(2000)
    state = initial_state(function.initial_weights())
    sums = function(state.weights, units, 0)
    output = function.mechanism.aggregate(0, sums.total)
    state = function.advance(server, state, output.mean)
    assert state.rounds == 1
    assert low <= _accuracy(state.weights, units) <= high
    np.testing.assert_allclose(released_weights(server, state), state.weights, rtol=1e-5)


def test_probabilities_of_a_solved_head_are_sharp_enough():
    """Softmax of plain scores, between 0 and 1, would give at most 0.48 of four classes."""
    function, units = _function(), _units(2000)
    state = initial_state(function.initial_weights())
    output = function.mechanism.aggregate(0, function(state.weights, units, 0).total)
    weights = function.advance(ServerConfig(), state, output.mean).weights
    kernel, bias = weights[:-CLASSES].reshape(16, CLASSES), weights[-CLASSES:]
    rows = np.concatenate(units)
    logits = rows["mantissas"][:, :-1] / rows["scale"][:, None] @ kernel + bias
    powers = np.exp(logits - logits.max(1, keepdims=True))
    wanted = powers[np.arange(len(rows)), rows["label"]] / powers.sum(1)
    assert wanted.mean() > 0.6
    assert -np.log(wanted).mean() < 0.7  # and not too sharp


def test_leaving_a_unit_out_moves_the_sum_by_at_most_the_clip_and_no_other_bit():
    function, units = _function(), _units(40)
    start = function.initial_weights()

    def total(chosen):
        return np.asarray(function(start, chosen, 0).total)

    whole = total(units)
    function._chunk = 7  # other products, the same bits
    for place in (0, 17, 39):
        alone = total([units[place]])
        np.testing.assert_array_equal(whole - total(units[:place] + units[place + 1 :]), alone)
        assert 0 < np.linalg.norm(alone.astype(float)) <= 2.0**32


def test_units_without_images_and_past_the_cap_are_handled():
    function, units = _function(), _units(3)
    empty = rows_of(np.zeros((0, 16), np.float32), np.zeros(0, int))
    start = function.initial_weights()
    with_empty = function(start, [*units, empty], 0)
    assert with_empty.clients[:, 3].tolist() == [1, 2, 3]
    many = rows_of(np.ones((9, 16), np.float32), np.zeros(9, int))
    first = rows_of(np.ones((3, 16), np.float32), np.zeros(3, int))
    sums = [np.asarray(function(start, [unit], 0).total) for unit in (many, first)]
    np.testing.assert_array_equal(*sums)
