"""Batch normalisation of Keras networks is folded exactly, and what is folded can be trained."""

import numpy as np
import pytest

from fedemb.config import ModelConfig
from fedemb.errors import ArtifactError, ConfigError
from fedemb.models.backbones import trainable_variables
from fedemb.models.imported import import_backbone
from fedemb.models.preprocessing import preprocess
from fedemb.models.public_backbone.card import read_card
from fedemb.models.public_backbone.folding import without_batch_norm
from fedemb.models.public_backbone.keras_network import of_file, of_network, write_built
from fedemb.models.public_backbone.pixels import BY_KIND

FIELDS = {"name": "x", "architecture": "", "licence": "", "provenance": ""}


def _drawn(network):
    """The network with statistics of other images."""
    random = np.random.default_rng(0)
    for layer in network._flatten_layers():
        if type(layer).__name__ == "BatchNormalization":
            layer.set_weights([random.uniform(0.5, 1.5, one.shape) for one in layer.get_weights()])
    return network


def _kinds(network):
    return {type(layer).__name__ for layer in network._flatten_layers()}


def _images(size, count=2):
    return np.random.default_rng(1).uniform(-1, 1, (count, size, size, 3)).astype(np.float32)


APPLICATIONS = {
    "conv, norm": "MobileNetV2",
    "norm, conv": "ResNet50V2",
    "separable, norm": "Xception",
    "rescaling, normalisation, dropout": "EfficientNetB0",
}


@pytest.mark.long
@pytest.mark.parametrize("name", APPLICATIONS)
def test_folded_application_is_the_same_function(name):
    import keras

    function = getattr(keras.applications, APPLICATIONS[name])
    net = _drawn(function(weights=None, include_top=False, pooling="avg", input_shape=(75, 75, 3)))
    images = _images(75)
    wanted = np.asarray(net(images, training=False))
    folded = without_batch_norm(net)
    assert not _kinds(folded) & {"BatchNormalization", "Dropout"}
    found = np.asarray(folded(images, training=False))
    assert np.abs(found - wanted).max() < 1e-5 * np.abs(wanted).max()


def _small(*layers, shape=(8, 8, 3)):
    import keras

    images = x = keras.Input(shape)
    for layer in layers:
        x = layer(x)
    return _drawn(keras.Model(images, x))


def _layers():
    import keras

    return keras.layers


NETS = {
    "activation before": lambda: (
        _layers().Conv2D(4, 3, activation="relu"),
        _layers().BatchNormalization(),
        _layers().GlobalAveragePooling2D(),
    ),
    "dense": lambda: (
        _layers().Flatten(),
        _layers().Dense(4),
        _layers().BatchNormalization(scale=False),
    ),
    "depthwise with a multiplier": lambda: (
        _layers().DepthwiseConv2D(3, depth_multiplier=2, use_bias=False),
        _layers().BatchNormalization(center=False),
        _layers().GlobalAveragePooling2D(),
    ),
}


@pytest.mark.parametrize("name", NETS)
def test_folded_network_is_the_same_function(name):
    net, images = _small(*NETS[name]()), _images(8)
    folded = without_batch_norm(net)
    assert "BatchNormalization" not in _kinds(folded)
    np.testing.assert_allclose(folded(images), net(images), rtol=1e-5, atol=1e-6)


def test_output_that_is_used_twice_is_not_folded_into():
    import keras

    images = keras.Input((8, 8, 3))
    x = keras.layers.Conv2D(3, 3, padding="same")(images)
    y = keras.layers.Add()([x, keras.layers.BatchNormalization()(x)])
    net = _drawn(keras.Model(images, keras.layers.GlobalAveragePooling2D()(y)))
    np.testing.assert_allclose(
        without_batch_norm(net)(_images(8)), net(_images(8)), rtol=1e-5, atol=1e-6
    )


def test_inner_network_is_folded():
    import keras

    inner = _small(
        _layers().Conv2D(4, 3), _layers().BatchNormalization(), _layers().GlobalAveragePooling2D()
    )
    images = keras.Input((8, 8, 3))
    net = keras.Model(images, inner(images))
    folded = without_batch_norm(net)
    assert "BatchNormalization" not in _kinds(folded)
    np.testing.assert_allclose(folded(_images(8)), net(_images(8)), rtol=1e-5, atol=1e-6)


def test_sequential_network_is_folded():
    import keras

    layers = [_layers().Conv2D(4, 3), _layers().BatchNormalization(), _layers().Dropout(0.3)]
    net = _drawn(keras.Sequential([keras.Input((8, 8, 3)), *layers]))
    folded = without_batch_norm(net)
    assert not _kinds(folded) & {"BatchNormalization", "Dropout"}
    np.testing.assert_allclose(folded(_images(8)), net(_images(8)), rtol=1e-5, atol=1e-6)


def test_batch_norm_that_cannot_be_folded_is_one_sentence():
    net = _small(_layers().Flatten(), _layers().ReLU(), _layers().BatchNormalization())
    with pytest.raises(ConfigError, match="cannot be folded"):
        without_batch_norm(net)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "pixels", "mode"),
    [
        ("MobileNetV2", "-1..1", "tf"),
        ("ResNet50", "caffe", "caffe"),
        ("DenseNet121", "imagenet", "torch"),
    ],
)
def test_converted_application_gives_what_keras_gives_of_the_same_photo(
    tmp_path, name, pixels, mode
):
    import keras

    function = getattr(keras.applications, name)
    net = _drawn(function(weights=None, include_top=False, pooling="avg", input_shape=(64, 64, 3)))
    raw = np.random.default_rng(2).integers(0, 256, (2, 64, 64, 3)).astype(np.uint8)
    prepared = keras.applications.imagenet_utils.preprocess_input(raw.astype("f4"), mode=mode)
    wanted = np.asarray(net(prepared, training=False))
    net.save(tmp_path / "net.keras")
    built = of_file(tmp_path / "net.keras", None)
    assert built.network.input_shape[1:] == (64, 64, 3)
    found = np.asarray(built.network(preprocess(raw)))
    assert np.abs(found - wanted).max() < 1e-4 * np.abs(wanted).max()
    card = write_built(built, tmp_path / "x.keras", FIELDS)
    assert card.trained_pixels == str(BY_KIND[pixels])


@pytest.mark.long
def test_converted_file_can_be_trained_where_the_original_is_refused(tmp_path):
    import keras

    net = _drawn(
        keras.applications.MobileNetV2(
            weights=None, include_top=False, pooling="avg", input_shape=(32, 32, 3), alpha=0.35
        )
    )
    net.save(tmp_path / "net.keras")
    model = ModelConfig(
        backbone="imported", image_size=32, channels=3, embedding_dim=1280, trainable="all"
    )
    with pytest.raises(ArtifactError, match=r"BatchNormalization"):
        import_backbone(tmp_path / "net.keras", model)
    write_built(of_file(tmp_path / "net.keras", None), tmp_path / "x.keras", FIELDS)
    backbone = import_backbone(tmp_path / "x.keras", model)
    assert len(trainable_variables(backbone, "all")) > 100
    assert len(trainable_variables(backbone, "last_block")) > 0


def test_converting_a_backbone_file_again_changes_nothing(tmp_path):
    net = _small(_layers().Conv2D(4, 3), _layers().GlobalAveragePooling2D(name="end"))
    built = of_network(net, BY_KIND["0..255"], "net", "0" * 64)
    write_built(built, tmp_path / "x.keras", FIELDS)
    again = of_file(tmp_path / "x.keras", None)
    images = _images(8)
    np.testing.assert_allclose(again.network(images), built.network(images), rtol=1e-6)
    assert read_card(tmp_path / "x.keras").tap("head").layer == "end"


def test_file_that_does_not_state_its_pixels_is_one_sentence(tmp_path):
    net = _small(_layers().Conv2D(4, 3), _layers().GlobalAveragePooling2D())
    net.save(tmp_path / "net.keras")
    with pytest.raises(ConfigError, match=r"Pass --pixels with one of"):
        of_file(tmp_path / "net.keras", None)


def test_map_of_features_is_averaged():
    built = of_network(_small(_layers().Conv2D(4, 3)), BY_KIND["-1..1"], "net", "0" * 64)
    assert built.network.output_shape == (None, 4)


def test_weights_that_are_not_finite_are_refused():
    net = _small(_layers().Conv2D(4, 3))
    net.set_weights([np.full_like(one, np.nan) for one in net.get_weights()])
    with pytest.raises(ArtifactError, match="NaN or infinite"):
        of_network(net, BY_KIND["-1..1"], "net", "0" * 64)
