"""DP-SGD of a head in closed form, against the round that forms every gradient."""

import numpy as np
import pytest

from fedemb.config import ModelConfig, UnitGradientConfig
from fedemb.errors import ConfigError
from fedemb.models.backbones import without_head
from fedemb.privacy.feature_sums import (
    clipped_product_sum,
    exact_logits,
    whole_features,
    whole_weights,
)
from fedemb.training import ClientExamples, build_backbone, trainable_variables
from fedemb.training.feature_cache import FeatureCache, rows_of
from fedemb.training.heads import HeadGradientFunction
from fedemb.training.units import UnitGradientFunction
from tests.kit.privacy_worlds import noiseless

SIZE, CLASSES = 12, 5
MODEL = ModelConfig(
    backbone="tanh_cnn",
    image_size=SIZE,
    embedding_dim=16,
    classes=("a", "b", "c", "d", "e"),
    head_init="glorot",
)
CONFIG = UnitGradientConfig(images_per_unit=3, microbatch=16)


def _units(count=6):
    random = np.random.default_rng(0)
    return [
        ClientExamples(
            0,
            group,
            random.integers(0, 256, (1 + group % 4, SIZE, SIZE, 1), np.uint8),
            random.integers(0, CLASSES, 1 + group % 4),
        )
        for group in range(count)
    ]


def _function(clip, config=CONFIG):
    classifier = build_backbone(MODEL, 1)
    return classifier, HeadGradientFunction(classifier, noiseless(clip), config)


def _features(classifier, units):
    cache = FeatureCache(without_head(classifier))
    return [cache.of(bytes([u.group]), lambda u=u: u) for u in units]


@pytest.mark.parametrize("clip", [0.5, 10.0], ids=["clipped", "whole"])
def test_closed_form_equals_the_sum_of_formed_gradients(clip):
    units = _units()
    classifier, function = _function(clip)
    formed = UnitGradientFunction(
        classifier, noiseless(clip), CONFIG, variables=trainable_variables(classifier, "head")
    )
    weights = function.initial_weights()
    found = function(weights, _features(classifier, units), 0)
    expected = formed(weights, units, 0)
    scale = clip / 2.0**32
    one, other = (np.asarray(sums.total) * scale for sums in (found, expected))
    assert np.linalg.norm(one - other) <= 1e-3 * np.linalg.norm(other)
    for column in (0, 1, 3):
        np.testing.assert_allclose(
            found.clients[:, column], expected.clients[:, column], rtol=1e-3, atol=1e-6
        )


def test_a_unit_more_moves_its_own_integers_in_and_no_other_bit():
    classifier, function = _function(0.5)
    features, weights = _features(classifier, _units(8)), function.initial_weights()

    def total(units):
        return np.asarray(function(weights, units, 0).total)

    whole = total(features)
    function._chunk = 3  # other products, the same bits
    for place in (0, 3, 7):
        alone = total([features[place]])
        np.testing.assert_array_equal(
            whole - total(features[:place] + features[place + 1 :]), alone
        )
        assert 0 < np.linalg.norm(alone / 2.0**32) <= 1.0
    np.testing.assert_array_equal(total(features[::-1]), whole)


def test_no_record_leaves_the_ball_however_features_and_errors_lie():
    """Features of one size and of many, images that add up and that cancel, errors side by side."""
    random = np.random.default_rng(0)
    for trial in range(1200):
        images = 1 + trial % 3
        spread = np.exp(random.normal(0, 6 * (trial % 2), (images, 40)))
        common = random.normal(size=40) * random.choice([-1.0, 1.0], (images, 1))
        values = (common + random.normal(size=(images, 40))) * spread
        features = whole_features(values.astype(np.float32))
        errors = random.normal(size=(1, images, 4)) * np.exp(random.normal(0, 6))
        if trial % 4 != 1:
            errors = np.exp(random.normal(size=(1, images, 1))) * errors[:, :1]
        batch = features._replace(mantissas=features.mantissas[None], scales=features.scales[None])
        for clip in (1e-9, 0.3):
            summed, _ = clipped_product_sum(batch, errors, l2_norm_clip=clip, grid_bits=32)
            assert np.linalg.norm(summed.astype(np.float64)) <= 2.0**32


def test_images_that_cancel_move_no_other_unit():
    """Their record is short, their parts are not, and those must stay exact in doubles, too."""
    features = whole_features(np.full((2, 5), 0.7, np.float32))
    errors = np.full((3, 2, 4), 1e-3)
    errors[1] = [[1e9], [-1e9]]

    def total(units):
        batch = features._replace(
            mantissas=np.stack([features.mantissas] * len(units)),
            scales=np.stack([features.scales] * len(units)),
        )
        return clipped_product_sum(batch, errors[units], l2_norm_clip=1.0, grid_bits=32)[0]

    np.testing.assert_array_equal(total([0, 1, 2]), total([0]) + total([1]) + total([2]))
    assert np.all(total([0]) != 0)


def test_an_error_that_is_no_number_adds_nothing():
    features = whole_features(np.ones((2, 3), np.float32))
    batch = features._replace(
        mantissas=features.mantissas[:, None], scales=features.scales[:, None]
    )
    errors = np.array([[[np.nan, 1.0]], [[0.5, -0.5]]])
    summed, _ = clipped_product_sum(batch, errors, l2_norm_clip=1.0, grid_bits=32)
    alone, _ = clipped_product_sum(
        batch._replace(mantissas=batch.mantissas[1:], scales=batch.scales[1:]),
        errors[1:],
        l2_norm_clip=1.0,
        grid_bits=32,
    )
    np.testing.assert_array_equal(summed, alone)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_feature_that_is_no_number_takes_out_its_unit_and_moves_no_other(value):
    """As from a backbone that divides by the length of a black image."""
    classifier, function = _function(0.5)
    units, weights = _features(classifier, _units()), function.initial_weights()
    features = np.ones((2, 16), np.float32)
    features[1, 7] = value
    broken = rows_of(features, np.zeros(2, np.int64))

    def total(units):
        return np.asarray(function(weights, units, 0).total)

    np.testing.assert_array_equal(total([*units[:2], broken, *units[2:]]), total(units))
    assert not total([broken]).any()


def test_units_of_any_number_of_images_are_summed_exactly_however_many_are_sampled():
    """At 512 images a unit four of them fill an exact sum; more are added one sum after another."""
    config = CONFIG.model_copy(update={"images_per_unit": 512})
    classifier, function = _function(0.5, config)
    units = 5 * _features(classifier, _units())
    weights = function.initial_weights()
    found = function(weights, units, 0).total
    alone = [function(weights, [unit], 0).total for unit in units]
    np.testing.assert_array_equal(found, np.sum(alone, axis=0))


def test_units_without_images_leave_the_others_in(monkeypatch):
    """However many of them come at once, more than are packed at once too."""
    classifier, function = _function(0.5)
    units = _features(classifier, _units())
    weights, wanted = function.initial_weights(), function(function.initial_weights(), units, 0)
    monkeypatch.setattr(function, "_chunk", 2)
    mixed = [*units[:1], *5 * [units[0][:0]], *units[1:], units[0][:0]]
    found = function(weights, mixed, 0)
    np.testing.assert_array_equal(found.total, wanted.total)
    assert len(found.clients) == len(units)


def test_logits_have_the_same_bits_alone_and_in_a_batch():
    random = np.random.default_rng(1)
    values = random.normal(size=(33, 500)).astype(np.float32)
    weights = random.normal(size=(501, 10)).astype(np.float32)
    features, whole = whole_features(values), whole_weights(weights)
    batch = exact_logits(features, whole)
    for row in (0, 17, 32):
        one = features._replace(
            mantissas=features.mantissas[row : row + 1], scales=features.scales[row : row + 1]
        )
        np.testing.assert_array_equal(exact_logits(one, whole)[0], batch[row])
    np.testing.assert_allclose(batch, values @ weights[:-1] + weights[-1], rtol=1e-3, atol=2e-2)


@pytest.mark.parametrize("value", [0.0, np.inf, np.nan])
def test_weights_of_zero_give_zero_and_others_that_are_no_numbers_none(value):
    features = whole_features(np.ones((2, 3), np.float32))
    logits = exact_logits(features, whole_weights(np.full((4, 5), value, np.float32)))
    assert np.all(logits == 0.0 if value == 0.0 else np.isnan(logits))


def test_units_of_one_image_are_summed_as_those_of_several_are():
    """The shorter way, for units that are one image each, gives the same sum."""
    classifier, one = _function(0.5, UnitGradientConfig(images_per_unit=1))
    _, several = _function(0.5)
    units = [unit[:1] for unit in _features(classifier, _units(8))]
    sums = [np.asarray(f(f.initial_weights(), units, 0).total) for f in (one, several)]
    # The slack for several images shortens a record a little.
    assert 0 < np.linalg.norm(sums[0] - sums[1]) < 1e-4 * np.linalg.norm(sums[0])


def test_views_of_cached_features_are_refused_with_a_sentence():
    with pytest.raises(ConfigError, match="does not support views"):
        _function(1.0, UnitGradientConfig(views=2))
