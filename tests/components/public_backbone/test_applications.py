"""Keras applications: all are accepted by the import, and their weights can be a local file."""

import numpy as np
import pytest

from fedemb.config import ModelConfig
from fedemb.errors import ArtifactError, ConfigError, InputError
from fedemb.models.imported import check_import, import_backbone, known_pixels
from fedemb.models.public_backbone.applications import applications

SMALL = ("keras-convnexttiny", "keras-mobilenetv3small", "keras-inceptionresnetv2")
ALL = {entry.name: entry for entry in applications()}


def _network(entry, size, weights=None):
    import keras

    return getattr(keras.applications, entry.function)(
        weights=weights, include_top=False, pooling="avg", input_shape=(size, size, 3)
    )


def test_table_names_all_applications_of_keras():
    import keras

    found = {name for name in dir(keras.applications) if name[0].isupper()}
    assert found == {entry.function for entry in ALL.values()}


def _import(entry, folder):
    net = _network(entry, max(entry.least, 64))
    path = folder / "net.keras"
    net.save(path)
    check_import(path, "projection")
    assert known_pixels(path)[0] == entry.pixels
    model = ModelConfig(
        backbone="imported",
        image_size=net.input_shape[1],
        channels=3,
        embedding_dim=8,
        trainable="projection",
    )
    backbone = import_backbone(path, model)
    assert (net.count_params(), net.output_shape[1]) == (entry.parameters, entry.features)
    images = np.random.default_rng(0).uniform(-1, 1, (2, *net.input_shape[1:])).astype(np.float32)
    inner = next(layer for layer in backbone.layers if layer.name == net.name)
    np.testing.assert_allclose(inner(images), net(images, training=False), rtol=1e-3, atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("name", SMALL)
def test_application_is_accepted_by_the_import(tmp_path, name):
    """ConvNeXt has layer scale, InceptionResNetV2 a scaled sum; both were refused."""
    _import(ALL[name], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(ALL.keys() - set(SMALL)))
def test_every_application_is_accepted_by_the_import(tmp_path, name):
    _import(ALL[name], tmp_path)


@pytest.mark.long
def test_weights_of_a_local_file_are_read(tmp_path):
    entry = ALL["keras-mobilenetv3small"]
    net = _network(entry, 32)
    net.save_weights(tmp_path / "net.weights.h5")
    card = entry.write(tmp_path / "x.keras", 32, tmp_path / "net.weights.h5")
    assert card.taps[0].features == entry.features
    assert card.source == "net.weights.h5"
    with pytest.raises(ArtifactError, match="does not hold the weights of MobileNetV2"):
        ALL["keras-mobilenetv2"].write(tmp_path / "y.keras", 32, tmp_path / "net.weights.h5")
    with pytest.raises(InputError, match="is not a file"):
        entry.write(tmp_path / "y.keras", 32, tmp_path / "none.h5")
    with pytest.raises(ConfigError, match="at least 32"):
        entry.write(tmp_path / "y.keras", 16)


def _transformer():
    """A network with a class token, position embeddings and attention with dropout."""
    import keras

    from fedemb.models.scaled import first_token_layer, scaled_layers, token_layer

    images = keras.Input((8, 8, 3))
    x = keras.layers.Reshape((16, 8))(keras.layers.Conv2D(8, 2, 2)(images))
    x = token_layer()()(x)
    y = keras.layers.LayerNormalization()(x)
    y = keras.layers.MultiHeadAttention(2, 4, dropout=0.3)(y, y)
    x = keras.layers.Add()([x, scaled_layers()["LayerScale"](0.5, 8)(y)])
    return keras.Model(images, first_token_layer()()(x))


def test_attention_is_accepted_and_its_dropout_has_no_effect(tmp_path):
    net = _transformer()
    net.save(tmp_path / "net.keras")
    model = ModelConfig(
        backbone="imported", image_size=8, channels=3, embedding_dim=8, trainable="all"
    )
    backbone = import_backbone(tmp_path / "net.keras", model)
    images = np.random.default_rng(0).uniform(-1, 1, (3, 8, 8, 3)).astype(np.float32)
    wanted = net(images, training=False)
    np.testing.assert_allclose(backbone(images, training=True), wanted, rtol=1e-5, atol=1e-6)
    assert not any("seed" in one.path for one in backbone.non_trainable_variables)


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
