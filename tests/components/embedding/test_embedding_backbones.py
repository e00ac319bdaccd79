import keras
import numpy as np
import pytest

from fedemb.config import ModelConfig
from fedemb.errors import ConfigError
from fedemb.models.layers import plain_form
from fedemb.training import (
    build_backbone,
    check_backbone,
    embed,
    load_backbone,
    save_backbone,
    trainable_variables,
)


def _count(variables):
    return int(sum(np.prod(v.shape) for v in variables))


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "size", "channels", "parameters"),
    [
        ("lenet", 28, 1, 453_632),
        ("mobilenetv2", 32, 3, 2_387_840),
        ("resnet8", 32, 3, 85_712),
        ("resnet8_ws", 32, 3, 85_712),
        ("resnet8_s2", 28, 1, 163_680),
    ],
)
def test_backbone_has_the_published_number_of_parameters(name, size, channels, parameters):
    model = ModelConfig(backbone=name, image_size=size, channels=channels)
    backbone = build_backbone(model, seed=0)
    assert _count(trainable_variables(backbone, "all")) == parameters
    assert not backbone.non_trainable_variables


@pytest.mark.parametrize(
    ("name", "size", "features", "parameters"),
    [
        ("tanh_cnn", 32, 2048, 287_008),
        ("wrn_16_4", 32, 256, 2_750_832),
    ],
)
def test_backbone_of_dp_sgd_has_the_published_size(name, size, features, parameters):
    """Without a head. WRN-16-4 has 2.7 million."""
    model = ModelConfig(
        backbone=name, image_size=size, channels=3, projection=False, embedding_dim=features
    )
    assert _count(build_backbone(model, 0).trainable_variables) == parameters


def test_quickstart_backbone_is_small():
    assert _count(build_backbone(ModelConfig(backbone="tiny"), 0).trainable_variables) <= 60_000


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "size", "channels", "group", "parameters"),
    [
        ("mobilenetv2", 32, 3, "conv_frozen", 198_080),
        ("lenet", 28, 1, "projection", 401_536),
    ],
)
def test_freezing_leaves_the_named_group(name, size, channels, group, parameters):
    model = ModelConfig(backbone=name, image_size=size, channels=channels)
    assert _count(trainable_variables(build_backbone(model, 0), group)) == parameters


def test_freezing_everything_is_refused():
    with pytest.raises(ConfigError, match="head leaves nothing"):
        trainable_variables(build_backbone(ModelConfig(backbone="lenet"), 0), "head")


def test_initial_weights_depend_on_the_seed_alone():
    model = ModelConfig(backbone="tiny")
    first, again, other = (build_backbone(model, seed).get_weights() for seed in (3, 3, 4))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not np.array_equal(first[0], other[0])


def _with_batch_norm(model):

    inputs = keras.Input((model.image_size, model.image_size, model.channels))
    x = keras.layers.BatchNormalization()(keras.layers.Flatten()(inputs))
    return keras.Model(inputs, keras.layers.Dense(model.embedding_dim)(x))


def _with_dropout(model):

    inputs = keras.Input((model.image_size, model.image_size, model.channels))
    x = keras.layers.Dropout(0.5)(keras.layers.Flatten()(inputs))
    return keras.Model(inputs, keras.layers.Dense(model.embedding_dim)(x))


def test_batch_norm_and_dropout_are_refused_in_a_sentence():
    model = ModelConfig(backbone="own:model", embedding_dim=4)
    with pytest.raises(ConfigError, match="mixes the images of different users"):
        check_backbone(_with_batch_norm(model), model)
    with pytest.raises(ConfigError, match="every seed must depend on the virtual client alone"):
        check_backbone(_with_dropout(model), model)


def test_unknown_and_misfit_backbones_are_refused():
    with pytest.raises(ConfigError, match="take one of lenet, mobilenetv2"):
        build_backbone(ModelConfig(backbone="alexnet"), 0)
    with pytest.raises(ConfigError, match="cannot be imported"):
        build_backbone(ModelConfig(backbone="no_such_module:build"), 0)
    backbone = build_backbone(ModelConfig(backbone="tiny"), 0)
    with pytest.raises(ConfigError, match=r"set model\.image_size"):
        check_backbone(backbone, ModelConfig(backbone="tiny", embedding_dim=64))


def test_embeddings_have_unit_length_and_ignore_their_neighbours():
    backbone = build_backbone(ModelConfig(backbone="resnet8", channels=3), 0)
    images = np.random.default_rng(0).integers(0, 256, (11, 28, 28, 3), np.uint8)
    together = embed(backbone, images, batch_size=4)
    assert together.shape == (11, 128)
    np.testing.assert_allclose(np.linalg.norm(together, axis=1), 1, atol=1e-5)
    np.testing.assert_array_equal(together[:5], embed(backbone, images[:5], batch_size=4))


def _standardized():
    model = ModelConfig(backbone="resnet8_ws", image_size=16, embedding_dim=8)
    return model, build_backbone(model, 3)


def test_standardised_weights_ignore_mean_and_scale_of_a_kernel():
    model, backbone = _standardized()
    images = np.random.default_rng(0).integers(0, 256, (5, 16, 16, 1), np.uint8)
    before = embed(backbone, images)
    kernel = backbone.get_layer("block2_1_conv1").kernel
    kernel.assign(3.0 * kernel + 0.5)
    np.testing.assert_allclose(embed(backbone, images), before, atol=1e-4)
    plain = build_backbone(model.model_copy(update={"backbone": "resnet8"}), 3)
    plain.set_weights(backbone.get_weights())
    assert np.abs(embed(plain, images) - before).max() > 1e-2


def test_standardised_backbone_is_released_in_ordinary_layers(tmp_path):
    model, backbone = _standardized()
    images = np.random.default_rng(0).integers(0, 256, (5, 16, 16, 1), np.uint8)
    released = plain_form(backbone)
    kinds = {type(layer).__name__ for layer in released.layers}
    assert "StandardizedConv2D" not in kinds
    assert [v.path for v in released.weights] == [v.path for v in backbone.weights]
    np.testing.assert_allclose(embed(released, images), embed(backbone, images), atol=1e-5)
    save_backbone(backbone, tmp_path / "backbone.keras")
    again = load_backbone(tmp_path / "backbone.keras", model)
    np.testing.assert_array_equal(embed(again, images), embed(backbone, images))
    ordinary = build_backbone(ModelConfig(backbone="tiny"), 0)
    assert plain_form(ordinary) is ordinary
