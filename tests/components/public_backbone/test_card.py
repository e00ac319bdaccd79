"""The card of a backbone file: stored beside the network, and refused in another file."""

import zipfile

import numpy as np
import pytest

from fedemb.errors import ArtifactError
from fedemb.models.backbone_files import (
    CARD,
    read_card,
    write_backbone,
)

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


def test_file_of_keras_has_no_card(tmp_path):
    _net(0).save(tmp_path / "x.keras")
    assert read_card(tmp_path / "x.keras") is None


def test_card_in_a_file_of_another_network_is_refused(file, tmp_path):
    write_backbone(_net(1), tmp_path / "other.keras", FIELDS)
    with zipfile.ZipFile(tmp_path / "other.keras") as archive:
        weights = archive.read("model.weights.h5")
    with pytest.raises(ArtifactError, match="describes another network"):
        read_card(_with(file, tmp_path / "x.keras", {"model.weights.h5": weights}))


@pytest.mark.parametrize("card", [b"{}", b"[]", b"\xff", b'{"schema": "fedemb/verdict/1"}'])
def test_malformed_card_is_one_sentence(file, tmp_path, card):
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
