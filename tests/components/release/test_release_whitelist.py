"""What hides in a model beside its tensors: constants, settings, attributes, swapped values."""

import io
import json
import zipfile

import h5py
import numpy as np
import pytest

from fedemb.config import ModelConfig
from fedemb.documents.model import stored_tensors
from fedemb.errors import ArtifactError
from fedemb.foundation.canonical_json import file_digest
from tests.kit.pipeline_runs import honest_run
from tests.kit.process import python

MODEL = ModelConfig(backbone="lenet", embedding_dim=8, image_size=8, channels=1)
HEAD = np.random.default_rng(0).normal(size=(8, 10)).astype(np.float32)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A backbone, and its SavedModel."""
    from fedemb.models.backbone_files import save_backbone
    from fedemb.models.backbones import build_backbone
    from fedemb.release.released import save_for_serving

    folder = tmp_path_factory.mktemp("saved")
    backbone = build_backbone(MODEL, seed=0)
    save_backbone(backbone, folder / "backbone.keras")
    save_for_serving(backbone, MODEL, folder / "saved_model")
    return folder, backbone


def _problem(folder, graph=None, backbone="backbone.keras"):
    from fedemb.release.released import serving_problem

    path = folder / "saved_model" / "saved_model.pb"
    original = path.read_bytes()
    try:
        if graph is not None:
            path.write_bytes(graph.SerializeToString())
        return serving_problem(folder / "saved_model", folder / backbone, MODEL)
    finally:
        path.write_bytes(original)


def _graph(folder):
    from tensorflow.core.protobuf import saved_model_pb2

    model = saved_model_pb2.SavedModel()
    model.ParseFromString((folder / "saved_model" / "saved_model.pb").read_bytes())
    return model


def test_valid_saved_model_is_accepted(saved):
    assert _problem(saved[0]) is None


def test_serving_signature_with_a_head_is_refused(saved, tmp_path, monkeypatch):
    import tensorflow as tf

    from fedemb.models import keras_backend
    from fedemb.release.released import save_for_serving

    folder, backbone = saved
    honest = keras_backend.preprocess
    scale = np.random.default_rng(0).normal(size=(8, 8, 1)).astype(np.float32)
    monkeypatch.setattr(
        keras_backend, "preprocess", lambda images: honest(images) * tf.constant(scale)
    )
    save_for_serving(backbone, MODEL, tmp_path / "saved_model")
    (tmp_path / "backbone.keras").write_bytes((folder / "backbone.keras").read_bytes())
    monkeypatch.undo()
    assert "saved_model.pb of saved_model is not what" in _problem(tmp_path)


def _in_bytes(graph):
    node = graph.meta_graphs[0].graph_def.node.add(name="text", op="NoOp")
    node.attr["head"].s = np.tile(HEAD.ravel(), 20).tobytes()


def _in_a_second_graph(graph):
    graph.meta_graphs.add()


@pytest.mark.planted_bug(14)
@pytest.mark.parametrize("plant", [_in_bytes, _in_a_second_graph])
def test_weights_hidden_in_the_saved_model_graph_are_detected(saved, plant):
    folder, _ = saved
    graph = _graph(folder)
    plant(graph)
    assert _problem(folder, graph) is not None


OTHER_PROCESS = """
import sys
from pathlib import Path
import tensorflow as tf
tf.config.threading.set_intra_op_parallelism_threads(3)
tf.config.optimizer.set_jit(True)
for _ in range(20):
    tf.function(lambda x: x + 1)(tf.constant(1.0))
from fedemb.config import ModelConfig
from fedemb.release.released import serving_problem
folder = Path(sys.argv[1])
model = ModelConfig.model_validate_json(sys.argv[2])
print(serving_problem(folder / "saved_model", folder / "backbone.keras", model))
"""


@pytest.mark.long
def test_saved_model_bytes_are_equal_in_a_process_with_other_threads(saved):
    said = python("-c", OTHER_PROCESS, saved[0], MODEL.model_dump_json())
    assert said.strip() == "None", said


def test_numbers_hidden_in_process_settings_are_refused(saved):
    graph = _graph(saved[0])
    functions = graph.meta_graphs[0].graph_def.library.function
    functions[0].node_def[0].attr["config_proto"].s = HEAD.tobytes()
    assert "saved_model.pb of saved_model is not what" in _problem(saved[0], graph)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny", "tanh_cnn", "resnet8_ws", "scatter_linear"])
def test_saving_a_backbone_twice_gives_the_same_saved_model(tmp_path, name):
    """Groups, standardised and fixed filters, a classifier: what one process saves, so does another
    call."""
    from fedemb.models.backbone_files import save_backbone
    from fedemb.models.backbones import build_backbone
    from fedemb.release.released import save_for_serving, serving_problem

    model = MODEL.model_copy(update={"backbone": name, "image_size": 32})
    backbone = build_backbone(model, seed=0)
    save_backbone(backbone, tmp_path / "backbone.keras")
    save_for_serving(backbone, model, tmp_path / "saved_model")
    assert serving_problem(tmp_path / "saved_model", tmp_path / "backbone.keras", model) is None


def test_weights_with_other_values_are_refused(saved):
    from fedemb.models.backbone_files import save_backbone

    folder, backbone = saved
    first = backbone.weights[0]
    before = np.asarray(first)
    first.assign(before + 1e-3)  # an update that was never noised, say
    save_backbone(backbone, folder / "other.keras")
    first.assign(before)
    assert "is not what" in _problem(folder, backbone="other.keras")


# ---- the .keras file ----------------------------------------------------------------------------


def _changed(path, config=None, visit=None, members=()):
    """Writes the file again with other settings, other weights or further members."""
    with zipfile.ZipFile(path) as archive:
        content = {name: archive.read(name) for name in archive.namelist()}
    if config is not None:
        content["config.json"] = json.dumps(config).encode()
    if visit is not None:
        buffer = io.BytesIO(content["model.weights.h5"])
        with h5py.File(buffer, "r+") as file:
            visit(file)
        content["model.weights.h5"] = buffer.getvalue()
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in (*content.items(), *members):
            archive.writestr(name, data)


def _on_dataset(file):
    file["layers/conv2d_0/vars/0"].attrs["head"] = HEAD


def _on_root(file):
    file.attrs["head"] = HEAD


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"config": {"class_name": "Lambda", "config": {"function": "code"}}}, "Lambda"),
        ({"config": {"layers": [{"config": {"function": {"class_name": "__lambda__"}}}]}}, "code"),
        ({"config": {"mean": HEAD.ravel().tolist()}}, "80 numbers"),
        ({"config": {"initializer": {"value": HEAD.tolist()}}}, "80 numbers"),
        ({"config": {"name": "x" * 2000}}, "2000 characters"),
        ({"config": {"compile_config": {"optimizer": "adam"}}}, "compile settings"),
        ({"visit": _on_dataset}, "not short text"),
        ({"visit": _on_root}, "not short text"),
        ({"members": [("head.npy", b"x")]}, "head.npy"),
        ({}, ""),
    ],
)
def test_keras_file_holds_tensors_and_nothing_else(tmp_path, change, words):
    path = tmp_path / "backbone.keras"
    honest_run.write_model_file(path)
    _changed(path, **change)
    if not change:
        assert len(stored_tensors(path, file_digest(path))) == len(honest_run.TENSORS)
        return
    with pytest.raises(ArtifactError, match=words):
        stored_tensors(path, file_digest(path))
