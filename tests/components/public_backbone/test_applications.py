"""Keras applications: all are accepted by the import, and their weights can be a local file."""

import numpy as np
import pytest

from fedemb.config import ModelConfig
from fedemb.errors import ArtifactError, ConfigError, InputError
from fedemb.models.backbone_files import load_model
from fedemb.models.imported import check_import, import_backbone, known_pixels
from fedemb.models.keras_backend import preprocess
from fedemb.models.public_backbones import write_named

PIXELS = {
    "ConvNeXtTiny": "0..255",
    "DenseNet121": "imagenet",
    "EfficientNetB0": "0..255",
    "InceptionResNetV2": "-1..1",
    "MobileNetV2": "-1..1",
    "MobileNetV3Small": "0..255",
    "NASNetMobile": "-1..1",
    "ResNet50": "caffe",
    "ResNet50V2": "-1..1",
    "VGG16": "caffe",
    "Xception": "-1..1",
}
"""One network of each family, and its pixel values."""
SMALL = ("ConvNeXtTiny", "MobileNetV3Small", "InceptionResNetV2")


def _network(function, size, weights=None):
    import keras

    return getattr(keras.applications, function)(
        weights=weights, include_top=False, pooling="avg", input_shape=(size, size, 3)
    )


def _import(function, folder):
    net = _network(function, 96)
    path = folder / "net.keras"
    net.save(path)
    check_import(path, "projection")
    assert known_pixels(path)[0] == PIXELS[function]
    model = ModelConfig(
        backbone="imported",
        image_size=net.input_shape[1],
        channels=3,
        embedding_dim=8,
        trainable="projection",
    )
    backbone = import_backbone(path, model)
    images = np.random.default_rng(0).uniform(-1, 1, (2, *net.input_shape[1:])).astype(np.float32)
    inner = next(layer for layer in backbone.layers if layer.name == net.name)
    np.testing.assert_allclose(inner(images), net(images, training=False), rtol=1e-3, atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("function", SMALL)
def test_application_is_accepted_by_the_import(tmp_path, function):
    """ConvNeXt has layer scale, InceptionResNetV2 a scaled sum; both were refused."""
    _import(function, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("function", sorted(PIXELS.keys() - set(SMALL)))
def test_every_family_of_applications_is_accepted_by_the_import(tmp_path, function):
    _import(function, tmp_path)


@pytest.mark.long
def test_weights_of_a_local_file_are_read(tmp_path):
    weights = tmp_path / "net.weights.h5"
    net = _network("MobileNetV3Small", 32)
    net.save_weights(weights)
    card = write_named("keras-mobilenetv3small", tmp_path / "x.keras", 32, weights)
    assert card.taps[0].features == net.output_shape[-1]
    raw = np.random.default_rng(2).integers(0, 256, (2, 32, 32, 3)).astype(np.uint8)
    found = load_model(tmp_path / "x.keras")(preprocess(raw), training=False)
    wanted = np.asarray(net(raw.astype(np.float32), training=False))
    np.testing.assert_allclose(found, wanted, atol=1e-4 * np.abs(wanted).max())
    assert card.trained_pixels == "(x - 0) / 1"
    assert card.source == "net.weights.h5"
    with pytest.raises(ArtifactError, match=r"MobileNetV2 cannot be built from net\.weights\.h5"):
        write_named("keras-mobilenetv2", tmp_path / "y.keras", 32, weights)
    with pytest.raises(InputError, match="is not a file"):
        write_named("keras-mobilenetv2", tmp_path / "y.keras", 32, tmp_path / "none.h5")


def test_attention_between_images_is_refused(tmp_path):
    """Its layers are allowed, and the images of a batch take the place of positions."""
    import keras

    images = keras.Input((8, 8, 3))
    x = keras.layers.Flatten()(images)
    x = keras.layers.Reshape((2, 2, 8))(keras.layers.Dense(32)(x))
    attention = keras.layers.MultiHeadAttention(2, 4, attention_axes=(0,))
    x = keras.layers.Dense(8)(keras.layers.Flatten()(attention(x, x)))
    keras.Model(images, x).save(tmp_path / "net.keras")
    model = ModelConfig(
        backbone="imported", image_size=8, channels=3, embedding_dim=8, trainable="all"
    )
    with pytest.raises(ConfigError, match="mixes the images of different users"):
        import_backbone(tmp_path / "net.keras", model)


def test_network_with_two_outputs_is_refused(tmp_path):
    import keras

    images = keras.Input((8, 8, 3))
    x = keras.layers.Flatten()(images)
    two = [keras.layers.Dense(4, name="a")(x), keras.layers.Dense(4, name="b")(x)]
    for outputs in (two, {"a": two[0], "b": two[1]}):
        keras.Model(images, outputs).save(tmp_path / "net.keras")
        with pytest.raises(ArtifactError, match="has 2 outputs, and a backbone has one"):
            check_import(tmp_path / "net.keras", "projection")


def test_outputs_that_are_not_finite_cannot_be_checked(tmp_path):
    import keras

    images = keras.Input((8, 8, 3))
    x = keras.layers.Flatten()(images)
    for number in range(3):
        x = keras.layers.Dense(8, activation="exponential", name=f"d{number}")(x)
    net = keras.Model(images, x)
    net.set_weights([np.full_like(one, 100.0) for one in net.get_weights()])
    net.save(tmp_path / "net.keras")
    model = ModelConfig(
        backbone="imported", image_size=8, channels=3, embedding_dim=8, trainable="all"
    )
    with pytest.raises(ConfigError, match="are not finite"):
        import_backbone(tmp_path / "net.keras", model)
