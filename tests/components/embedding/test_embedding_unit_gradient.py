"""The round of DP-SGD against plain Keras, and what one unit can change."""

import math

import keras
import numpy as np
import pytest
import tensorflow as tf

from fedemb.config import ModelConfig, ServerConfig, UnitGradientConfig
from fedemb.errors import ConfigError, Refused
from fedemb.models.backbones import HEAD, build_backbone, trainable_variables, without_head
from fedemb.models.keras_backend import preprocess
from fedemb.privacy.feature_sums import (
    CONSTANT,
    clipped_product_sum,
    exact_logits,
    whole_features,
    whole_weights,
)
from fedemb.training import units as unit_gradient
from fedemb.training.feature_cache import FeatureCache, rows_of
from fedemb.training.heads import HeadGradientFunction
from fedemb.training.rounds import ClientExamples, seed_of
from fedemb.training.server import initial_state
from fedemb.training.units import UnitGradientFunction, apply_moves, draw_moves
from tests.kit.privacy_worlds import noiseless

SIZE, CLASSES, ROUND = 12, 5, 3
MODEL = ModelConfig(
    backbone="tanh_cnn",
    image_size=SIZE,
    embedding_dim=16,
    classes=("a", "b", "c", "d", "e"),
    head_init="glorot",
)
RESNET = MODEL.model_copy(update={"backbone": "resnet8"})
VIEWS = UnitGradientConfig(images_per_unit=3, microbatch=4, views=2, flip=True, crop_padding=2)


def _units(count=7, seed=0, most=4):
    """Units of one to four images, the last more than counts."""
    random = np.random.default_rng(seed)
    return [
        ClientExamples(
            0,
            group,
            random.integers(0, 256, (1 + group % most, SIZE, SIZE, 1), np.uint8),
            random.integers(0, CLASSES, 1 + group % most),
        )
        for group in range(count)
    ]


def _function(config=VIEWS, mechanism=None, group="all", model=MODEL, **changes):
    classifier = build_backbone(model, 1)
    variables = trainable_variables(classifier, group)
    return UnitGradientFunction(
        classifier, mechanism or noiseless(), config, variables=variables, seed=9, **changes
    )


def _sum(function, units):
    sums = function(function.initial_weights(), units, ROUND)
    return np.asarray(sums.total), sums


def _reference(function, unit, config):
    """Eager Keras: the gradient of the mean loss over images and views of one unit."""
    moves = draw_moves(config, seed_of(9, ROUND, unit.grouping, unit.group))
    count = min(len(unit.labels), config.images_per_unit)
    views = preprocess(apply_moves(tf.constant(unit.images[:count]), moves[:count]))
    labels = np.repeat(unit.labels[:count], config.views)
    with tf.GradientTape() as tape:
        logits = function._classifier(views, training=True)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
        loss = tf.reduce_mean(losses)
    gradients = tape.gradient(loss, [v.value for v in function.variables])
    return -np.concatenate([np.ravel(g) for g in gradients]).astype(np.float64)


@pytest.mark.long
@pytest.mark.parametrize(
    ("config", "model"),
    [(VIEWS, RESNET), (UnitGradientConfig(microbatch=16), MODEL)],
    ids=["resnet8-K=2", "tanh_cnn-K=1"],
)
def test_clipped_sum_equals_a_straightforward_reference(config, model):
    units, plain = _units(), _function(config, model=model)
    records = [_reference(plain, unit, config) for unit in units]
    norms = [np.linalg.norm(record) for record in records]
    clip = float(np.median(norms))
    expected = sum(r * min(1.0, clip / n) for r, n in zip(records, norms, strict=True))
    mechanism = noiseless(clip)
    total, sums = _sum(_function(config, mechanism, model=model, workers=2), units)
    found = total * clip / 2.0**mechanism.plan.grid_bits
    assert np.linalg.norm(found - expected) <= 1e-4 * np.linalg.norm(expected)
    np.testing.assert_allclose(sorted(sums.clients[:, 0]), sorted(norms), rtol=1e-3)


@pytest.mark.slow
def test_wide_residual_network_records_do_not_depend_on_other_units(monkeypatch):
    """`require_exact` refuses on the first round where they do; what trains is the whole net."""
    monkeypatch.setattr(UnitGradientFunction, "probe_units", 16)  # a record of these takes seconds
    wide = {"backbone": "wrn_16_4", "projection": False, "embedding_dim": 256}
    model = MODEL.model_copy(update=wide)
    function = _function(UnitGradientConfig(microbatch=2), model=model)
    total, sums = _sum(function, _units(3, most=1))
    norms = sums.clients[:, 0]
    assert np.isfinite(norms).all()
    assert (norms > 0).all()
    assert 0 < np.linalg.norm(total / 2.0**function.mechanism.plan.grid_bits) <= 3


ENOUGH = UnitGradientConfig(microbatch=16)


@pytest.mark.long
@pytest.mark.parametrize(("config", "model"), [(VIEWS, MODEL), (ENOUGH, RESNET)])
def test_adding_a_unit_changes_the_sum_by_exactly_its_clipped_record(config, model):
    """Record and replay: at most the clip, whatever the place, the neighbours and the fill."""
    function, units = _function(config, model=model, workers=2), _units(9)
    alone = [_sum(function, [unit])[0] for unit in units]
    grid = 2.0**function.mechanism.plan.grid_bits
    whole, _ = _sum(function, units)
    for left_out in (0, 4, 8):
        rest = [unit for unit in units if unit.group != left_out]
        np.testing.assert_array_equal(whole - _sum(function, rest)[0], alone[left_out])
        assert 0 < np.linalg.norm(alone[left_out] / grid) <= 1.0
    np.testing.assert_array_equal(_sum(function, units[::-1])[0], whole)
    other = _function(config, model=model, workers=3)
    np.testing.assert_array_equal(_sum(other, units)[0], whole)


def test_compiled_clip_equals_the_query_clip():
    """Compilers may reorder, fuse, and drop what they think cannot be: numbers that are none."""
    function, clip = _function(), 0.5
    random = np.random.default_rng(0)
    unit = random.normal(size=function.dim)
    unit /= np.linalg.norm(unit)
    records = {scale: clip * scale * unit for scale in (0, 1e-40, 0.3, 1, 1 + 1e-7, 7, 1e36)}
    for number in (np.nan, np.inf, -np.inf):
        records[number] = unit.copy()
        records[number][random.integers(function.dim)] = number
    empty = tf.zeros(function.dim, tf.int64)
    for name, record in records.items():
        update = tf.constant(record, tf.float32)
        found, norm = function._add(update, empty)
        wanted = function.mechanism.record([update])
        far = np.abs(found.numpy() - wanted.numpy()).max()
        assert far <= 1, name  # a sum of squares in another order
        assert np.linalg.norm(found.numpy() / 2.0**function.mechanism.plan.grid_bits) <= 1, name
        assert np.any(found.numpy()) == (np.isfinite(name) and name > 1e-30), name
        assert np.isfinite(norm) == np.isfinite(name), name


@pytest.mark.parametrize(
    "classes", [3, *(pytest.param(n, marks=pytest.mark.long) for n in (2, 10))]
)
def test_records_have_the_same_bits_at_any_place_whatever_the_number_of_classes(classes):
    """Also after a first step, when gradients below the head no longer vanish."""
    names = tuple(map(str, range(classes)))
    model = MODEL.model_copy(update={"classes": names, "head_init": "zeros"})
    function = _function(UnitGradientConfig(microbatch=4), model=model)
    random = np.random.default_rng(classes)
    units = [
        ClientExamples(0, number, unit.images, unit.labels % classes)
        for number, unit in enumerate(_units(64, most=1))
    ]
    weights = function.initial_weights()
    weights += random.normal(0.0, 0.05, weights.shape).astype(np.float32)
    function.require_exact(weights)
    whole = function(weights, units, ROUND).total
    for turned in (units[1:] + units[:1], units[2:] + units[:2], units[::-1]):
        found = function(weights, turned, ROUND).total
        np.testing.assert_array_equal(found, whole)
    alone = sum(np.asarray(function(weights, [unit], ROUND).total) for unit in units)
    np.testing.assert_array_equal(alone, whole)


def test_head_that_depends_on_the_batch_position_is_refused(monkeypatch):
    """Three logits a unit: the last of a micro-batch are computed in another way than the rest."""
    monkeypatch.setattr(unit_gradient, "_LANES", 1)
    model = MODEL.model_copy(update={"classes": ("a", "b", "c")})
    function = _function(UnitGradientConfig(microbatch=4), model=model)
    with pytest.raises(Refused, match="position in a batch of 4"):
        function.require_exact(function.initial_weights())


def test_views_depend_on_round_and_unit_alone():
    first, same, other, later = (
        draw_moves(VIEWS, seed_of(9, r, 0, g)) for r, g in ((3, 1), (3, 1), (3, 2), (4, 1))
    )
    np.testing.assert_array_equal(first, same)
    assert (first != other).any()
    assert (first != later).any()
    assert np.abs(first[..., :2]).max() <= 2


def test_views_equal_flipped_crops_of_numpy_reflect_padding():
    image = np.random.default_rng(0).integers(0, 256, (1, SIZE, SIZE, 3), np.uint8)
    padded = np.pad(image[0], ((2, 2), (2, 2), (0, 0)), mode="reflect")
    moves = np.array([[[-2, 1, 0], [2, 0, 1], [0, 0, 0]]], np.int32)
    found = apply_moves(tf.constant(image), tf.constant(moves)).numpy()
    np.testing.assert_array_equal(found[0], padded[0:SIZE, 3 : 3 + SIZE])
    np.testing.assert_array_equal(found[1], padded[4 : 4 + SIZE, 2 : 2 + SIZE][:, ::-1])
    np.testing.assert_array_equal(found[2], image[0])


def test_only_variables_of_the_trainable_group_are_in_the_record():
    head, norms = _function(group="head"), _function(group="conv_frozen", model=RESNET)
    assert [v.path for v in head.variables] == ["logits/kernel", "logits/bias"]
    assert {v.path.rsplit("/")[-1] for v in norms.variables} == {"gamma", "beta", "kernel", "bias"}
    assert len(_sum(head, _units())[0]) == 16 * CLASSES + CLASSES


def test_nan_weights_give_a_zero_sum():
    function, units = _function(), _units(4)
    weights = function.initial_weights()
    weights[:] = np.nan
    function._layout_checked = True
    total = function(weights, units, ROUND).total
    assert not np.asarray(total).any()


def test_records_that_depend_on_other_units_are_refused():
    function = _function(UnitGradientConfig(microbatch=4))
    sound = function._records

    def leaking(broadcast, units):
        updates, losses, counts = sound(broadcast, units)
        return updates + 1e-6 * tf.reduce_mean(updates, axis=0), losses, counts

    function._records = leaking
    read = []
    slabs = iter(lambda: read.append(1) or [], None)
    with pytest.raises(Refused, match="position in a batch of 4"):
        function.run(function.initial_weights(), slabs)
    assert not read


def test_zero_initial_head_does_not_hide_a_leak():
    """Below it all gradients vanish and any layout would pass, were the weights not moved first."""
    model = MODEL.model_copy(update={"head_init": "zeros"})
    function = _function(UnitGradientConfig(images_per_unit=2, microbatch=4), model=model)
    assert not any(v.numpy().any() for v in function.variables if v.path.startswith("logits/"))
    sound, below = function._records, [not v.path.startswith("logits/") for v in function.variables]
    leak = np.repeat(np.float32(below) * 0.01, [math.prod(v.shape) for v in function.variables])

    def leaking(broadcast, units):
        updates, losses, counts = sound(broadcast, units)
        return updates + leak * tf.reduce_mean(updates, axis=0), losses, counts

    function._records = leaking
    with pytest.raises(Refused, match="multiples of 16"):
        function.require_exact(function.initial_weights())


# ---- DP-SGD of a head in closed form, against the round that forms every gradient ----


CONFIG = UnitGradientConfig(images_per_unit=3, microbatch=16)


def _function_head(clip, config=CONFIG):
    classifier = build_backbone(MODEL, 1)
    return classifier, HeadGradientFunction(classifier, noiseless(clip), config)


def _features(classifier, units):
    cache = FeatureCache(without_head(classifier))
    return [cache.of(bytes([u.group]), lambda u=u: u) for u in units]


@pytest.mark.parametrize("clip", [0.5, 10.0], ids=["clipped", "whole"])
def test_closed_form_equals_the_sum_of_formed_gradients(clip):
    """A bias feature of `CONSTANT` is that of 1 beside features that are longer."""
    units = _units(6)
    classifier, function = _function_head(clip)
    weights = np.random.default_rng(0).normal(size=function.dim).astype(np.float32)
    found = function(weights, _features(classifier, units), 0)
    longer = keras.layers.Rescaling(1 / CONSTANT)(without_head(classifier).output)
    head = keras.layers.Dense(CLASSES, name=HEAD)
    formed = UnitGradientFunction(
        keras.Model(classifier.input, head(longer)),
        noiseless(clip / CONSTANT),
        CONFIG,
        variables=[head.kernel, head.bias],
    )
    rows = weights.reshape(-1, CLASSES)
    expected = formed(np.vstack([rows[:-1] * CONSTANT, rows[-1:]]).ravel(), units, 0)
    one, other = (np.asarray(sums.total) / 2.0**32 for sums in (found, expected))
    assert np.linalg.norm(one - other) <= 1e-3 * np.linalg.norm(other)
    expected.clients[:, 0] *= CONSTANT
    for column in (0, 1, 3):
        np.testing.assert_allclose(
            found.clients[:, column], expected.clients[:, column], rtol=1e-3, atol=1e-6
        )


def test_bias_moves_by_the_step_of_its_feature():
    _, function = _function_head(0.5)
    state = initial_state(np.zeros(function.dim, np.float32))
    moved = function.advance(ServerConfig(), state, np.ones(function.dim, np.float32)).weights
    assert moved[0] > 0
    np.testing.assert_allclose(moved[-CLASSES:], CONSTANT * moved[0], rtol=1e-6)


def test_adding_a_unit_to_a_head_round_changes_the_sum_by_its_record():
    classifier, function = _function_head(0.5)
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


def test_closed_form_record_norm_never_exceeds_the_clip():
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


def test_cancelling_image_gradients_do_not_change_other_units():
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


def test_nan_error_adds_nothing():
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
def test_unit_with_a_nan_feature_is_zero_and_changes_no_other(value):
    """As from a backbone that divides by the length of a black image."""
    classifier, function = _function_head(0.5)
    units, weights = _features(classifier, _units(6)), function.initial_weights()
    features = np.ones((2, 16), np.float32)
    features[1, 7] = value
    broken = rows_of(features, np.zeros(2, np.int64))

    def total(units):
        return np.asarray(function(weights, units, 0).total)

    np.testing.assert_array_equal(total([*units[:2], broken, *units[2:]]), total(units))
    assert not total([broken]).any()


def test_sum_is_exact_for_any_number_of_images_and_sampled_units():
    """At 512 images a unit four of them fill an exact sum; more are added one sum after another."""
    config = CONFIG.model_copy(update={"images_per_unit": 512})
    classifier, function = _function_head(0.5, config)
    units = 5 * _features(classifier, _units(6))
    weights = function.initial_weights()
    found = function(weights, units, 0).total
    alone = [function(weights, [unit], 0).total for unit in units]
    np.testing.assert_array_equal(found, np.sum(alone, axis=0))


def test_units_without_images_do_not_change_the_sum(monkeypatch):
    """However many of them come at once, more than are packed at once too."""
    classifier, function = _function_head(0.5)
    units = _features(classifier, _units(6))
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
def test_exact_logits_are_zero_for_zero_and_nan_for_nonfinite_weights(value):
    features = whole_features(np.ones((2, 3), np.float32))
    logits = exact_logits(features, whole_weights(np.full((4, 5), value, np.float32)))
    assert np.all(logits == 0.0 if value == 0.0 else np.isnan(logits))


def test_single_image_sum_is_close_to_the_general_sum():
    """The shorter way, for units that are one image each, gives the same sum."""
    classifier, one = _function_head(0.5, UnitGradientConfig(images_per_unit=1))
    _, several = _function_head(0.5)
    units = [unit[:1] for unit in _features(classifier, _units(8))]
    sums = [np.asarray(f(f.initial_weights(), units, 0).total) for f in (one, several)]
    # The slack for several images shortens a record a little.
    assert 0 < np.linalg.norm(sums[0] - sums[1]) < 1e-4 * np.linalg.norm(sums[0])


def test_views_with_cached_features_are_refused():
    with pytest.raises(ConfigError, match="does not support views"):
        _function_head(1.0, UnitGradientConfig(views=2))
