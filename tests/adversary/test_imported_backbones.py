"""Somebody else's `.keras` file: taken as layers and numbers, or refused in a sentence."""

import io
import json
import zipfile

import h5py
import numpy as np
import pytest

from fedemb.config import ModelConfig
from fedemb.errors import ArtifactError, ConfigError
from fedemb.models.imported import check_import, import_backbone

MODEL = ModelConfig(backbone="tiny", image_size=8, channels=3, embedding_dim=4)


@pytest.fixture(scope="module")
def honest(tmp_path_factory):
    """Members of an honest file."""
    import keras

    path = tmp_path_factory.mktemp("honest") / "own.keras"
    _net(lambda images, _: images).save(path)
    assert import_backbone(path, MODEL).count_params() > 0
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    assert keras.__version__ in members["metadata.json"].decode()
    return members


def _net(layer):
    import keras

    images = keras.Input((8, 8, 3))
    features = keras.layers.Conv2D(4, 3, activation="relu")(layer(images, keras))
    outputs = keras.layers.Dense(4)(keras.layers.GlobalAveragePooling2D()(features))
    return keras.Model(images, outputs)


def _written(path, members, compression=zipfile.ZIP_STORED):
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return path


def _refused(error):
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 900


def test_keras_file_with_a_flipped_bit_is_read_or_refused(honest, tmp_path):
    path = _written(tmp_path / "x.keras", honest)
    whole, random = path.read_bytes(), np.random.default_rng(3)
    ends = [*range(60), *range(len(whole) - 250, len(whole))]
    refused, said = 0, set()
    for place in ends:
        path.write_bytes(
            whole[:place] + bytes([whole[place] ^ (1 << random.integers(8))]) + whole[place + 1 :]
        )
        try:
            check_import(path, "all")
        except ArtifactError as error:
            refused += 1
            said.add(str(error))
    assert refused > 50
    assert not any("\n" in text for text in said)


def test_zip_bomb_is_refused_before_decompression(honest, tmp_path):
    bomb = {**honest, "config.json": b" " * (1 << 28)}
    path = _written(tmp_path / "x.keras", bomb, zipfile.ZIP_DEFLATED)
    assert path.stat().st_size < 1 << 20
    with pytest.raises(ArtifactError, match="unfold without end"):
        check_import(path, "all")


@pytest.mark.parametrize("hidden", ["Dropout", "BatchNormalization", "Lambda", "GRU"])
@pytest.mark.parametrize("setting", ["activation", "kernel_initializer", "made_up"])
def test_disallowed_layer_inside_a_layer_setting_is_refused(honest, tmp_path, hidden, setting):
    described = json.loads(honest["config.json"])
    (layer,) = (x for x in described["config"]["layers"] if x["class_name"] == "Conv2D")
    layer["config"][setting] = {
        "module": "keras.layers",
        "class_name": hidden,
        "config": {},
        "registered_name": None,
    }
    path = _written(tmp_path / "x.keras", {**honest, "config.json": json.dumps(described)})
    with pytest.raises(ArtifactError, match=f"not allowed here .*{hidden}"):
        check_import(path, "all")


def _until_it_trains(images, keras):
    """What would mix stands behind zeros, which training moves."""
    silent = keras.layers.Conv2D(3, 1, kernel_initializer="zeros")
    return keras.layers.Add()([images, silent(keras.layers.Softmax(axis=0)(images))])


MIXING = {
    "first": lambda x, keras: keras.layers.Softmax(axis=0)(x),
    "fourth from last": lambda x, keras: keras.layers.Softmax(axis=-4)(x),
    "until it trains": _until_it_trains,
    "unit": lambda x, keras: keras.layers.UnitNormalization(axis=-4)(x),
    "activation": lambda x, keras: keras.layers.Activation(keras.layers.Softmax(axis=0))(x),
    "standing in the batch": lambda x, keras: keras.layers.Reshape((8, 8, 3))(
        keras.layers.Softmax(axis=[0, 1])(x)
    ),
}


@pytest.mark.parametrize("layer", MIXING)
def test_layer_that_mixes_the_images_of_a_batch_is_refused(tmp_path, layer):
    """Its name is allowed, and what it computes of one user's image depends on another's."""
    _net(MIXING[layer]).save(tmp_path / "x.keras")
    with pytest.raises(ConfigError, match="mixes the images of different users") as refused:
        import_backbone(tmp_path / "x.keras", MODEL)
    _refused(refused)


def _outside(file, name, folder):
    file.create_dataset(name, shape=(4,), dtype="f4", external=[(str(folder / "photo"), 0, 16)])


def _link(file, name, folder):
    file[name] = h5py.ExternalLink(str(folder / "other.h5"), "x")


def _virtual(file, name, folder):
    layout = h5py.VirtualLayout(shape=(4,), dtype="f4")
    layout[:] = h5py.VirtualSource(str(folder / "other.h5"), "x", shape=(4,))
    file.create_virtual_dataset(name, layout)


@pytest.mark.parametrize("reach", [_outside, _link, _virtual])
def test_weights_stored_in_external_files_are_not_read(honest, tmp_path, reach):
    """A bias of four numbers from a private photo would be published with the public backbone."""
    (tmp_path / "photo").write_bytes(np.full(4, 42, np.float32).tobytes())
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["x"] = np.full(4, 42, np.float32)
    weights = io.BytesIO(honest["model.weights.h5"])
    with h5py.File(weights, "r+") as file:
        name = "layers/conv2d/vars/1"
        del file[name]
        reach(file, name, tmp_path)
    path = _written(tmp_path / "x.keras", {**honest, "model.weights.h5": weights.getvalue()})
    with pytest.raises(ArtifactError) as refused:
        import_backbone(path, MODEL)
    _refused(refused)
