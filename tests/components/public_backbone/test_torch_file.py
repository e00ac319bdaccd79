"""PyTorch files are read as numbers: no global is resolved but tensors, and sizes are bounded."""

import builtins
import os
import pickle
import zipfile
from collections import OrderedDict

import numpy as np
import pytest

from fedemb.errors import ArtifactError, InputError
from fedemb.models.public_backbone.torch_file import read_torch
from tests.kit import torch_files
from tests.kit.torch_files import bfloat16, tensors_of, write_stream, write_zip

WRITERS = {"stream": write_stream, "zip": write_zip}
ARRAYS = {
    "stem.weight": np.arange(24, dtype=np.float32).reshape(2, 3, 2, 2),
    "stem.bias": np.array([1.5, -2], np.float64),
    "half": np.array([0.5], np.float16),
    "num_batches_tracked": np.array(7, np.int64),
}


@pytest.mark.parametrize("layout", WRITERS)
def test_tensors_are_read_in_both_layouts(tmp_path, layout):
    found = read_torch(WRITERS[layout](tmp_path / "net.pth", tensors_of(ARRAYS)))
    assert found.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(found[name], array)
        assert found[name].dtype == array.dtype


def test_strided_view_of_a_storage_is_read(tmp_path):
    array = np.arange(6, dtype=np.float32).reshape(2, 3).T  # strides 1 and 3
    state = OrderedDict(a=torch_files._Tensor("0", array))
    found = read_torch(write_zip(tmp_path / "net.pth", state))
    np.testing.assert_array_equal(found["a"], array)


def test_bfloat16_becomes_float32(tmp_path):
    state = OrderedDict(a=bfloat16([1.0, -2.5, 0.0]))
    found = read_torch(write_zip(tmp_path / "net.pth", state))["a"]
    np.testing.assert_array_equal(found, np.array([1.0, -2.5, 0.0], np.float32))


@pytest.mark.parametrize("key", ["state_dict", "model", "model_state_dict"])
def test_state_dict_inside_a_checkpoint_is_found(tmp_path, key):
    path = write_zip(tmp_path / "net.pth", {"epoch": 3, key: tensors_of(ARRAYS)})
    assert read_torch(path).keys() == ARRAYS.keys()


class _Runs:
    """An object whose pickle calls a function."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


FORBIDDEN = {
    "command": (os.system, "touch {}"),
    "evaluation": (builtins.eval, "open('{}', 'w')"),
    "function of the reader": (pickle.loads, b""),
    "getattr": (getattr, "x", "upper"),
    "class": (bytearray, 1 << 40),
}


@pytest.mark.parametrize("layout", WRITERS)
@pytest.mark.parametrize("name", FORBIDDEN)
def test_pickle_with_another_global_is_refused_and_not_called(tmp_path, layout, name):
    trace = tmp_path / "trace"
    function, *arguments = FORBIDDEN[name]
    arguments = [one.format(trace) if isinstance(one, str) else one for one in arguments]
    state = tensors_of(ARRAYS)
    state["extra"] = _Runs(function, *arguments)
    with pytest.raises(ArtifactError, match="which is not a tensor") as refused:
        read_torch(WRITERS[layout](tmp_path / "net.pth", state))
    assert "\n" not in str(refused.value)
    assert not trace.exists()


def test_storage_classes_cannot_be_called(tmp_path):
    raw = b"ctorch\nFloatStorage\n(I10\ntR."
    with zipfile.ZipFile(tmp_path / "net.pth", "w") as archive:
        archive.writestr("net/data.pkl", raw)
    with pytest.raises(ArtifactError, match=r"not callable|damaged"):
        read_torch(tmp_path / "net.pth")


@pytest.mark.parametrize("layout", WRITERS)
def test_tensor_larger_than_its_storage_is_refused_before_memory_is_taken(tmp_path, layout):
    state = OrderedDict(a=torch_files._Tensor("0", np.zeros(4, np.float32)))
    path = WRITERS[layout](tmp_path / "net.pth", state)
    assert read_torch(path)["a"].shape == (4,)
    data = path.read_bytes()
    wide = data.replace(b"K\x04\x85", b"K\xf4\x85")  # the shape: (4,) becomes (244,)
    assert wide != data
    path.write_bytes(wide if layout == "stream" else _rezipped(path, data, wide))
    with pytest.raises(ArtifactError, match="outside of its storage"):
        read_torch(path)


def _rezipped(path, data, wide):
    path.write_bytes(data)
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    members["net/data.pkl"] = members["net/data.pkl"].replace(b"K\x04\x85", b"K\xf4\x85")
    with zipfile.ZipFile(path, "w") as archive:
        for name, member in members.items():
            archive.writestr(name, member)
    return path.read_bytes()


def test_many_views_of_one_storage_are_refused(tmp_path):
    array = np.zeros(1000, np.float32)
    state = OrderedDict((f"t{n}", torch_files._Tensor("0", array)) for n in range(50))
    with pytest.raises(ArtifactError, match="share their numbers many times"):
        read_torch(write_zip(tmp_path / "net.pth", state))


def test_compressed_members_are_refused(tmp_path):
    path = write_zip(tmp_path / "net.pth", tensors_of(ARRAYS), zipfile.ZIP_DEFLATED)
    with pytest.raises(ArtifactError, match="compressed"):
        read_torch(path)


OTHERS = {
    "numbers": {"a": 1},
    "list": [1, 2],
    "empty": {},
    "a tensor and a number": None,
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_not_a_state_dict_is_one_sentence(tmp_path, name):
    state = OTHERS[name] if OTHERS[name] is not None else {**tensors_of(ARRAYS), "epoch": 3}
    with torch_files._pretended_torch():
        packed = torch_files._pickled(state)
    with zipfile.ZipFile(tmp_path / "net.pth", "w") as archive:
        archive.writestr("net/data.pkl", packed)
    with pytest.raises(ArtifactError) as refused:
        read_torch(tmp_path / "net.pth")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("layout", WRITERS)
def test_damaged_file_is_one_sentence_or_read(tmp_path, layout):
    path = WRITERS[layout](tmp_path / "net.pth", tensors_of(ARRAYS))
    whole, random = path.read_bytes(), np.random.default_rng(5)
    said = []
    for place in random.integers(0, len(whole), 150):
        path.write_bytes(whole[:place] + bytes([random.integers(256)]) + whole[place + 1 :])
        try:
            read_torch(path)
        except (ArtifactError, InputError) as error:
            said.append(str(error))
    assert not any("\n" in text for text in said)
    for length in range(0, len(whole), 37):
        path.write_bytes(whole[:length])
        with pytest.raises((ArtifactError, InputError)):
            read_torch(path)
    assert len(said) > 30


def test_file_that_is_missing_is_named(tmp_path):
    with pytest.raises(InputError, match=r"none\.pth does not exist"):
        read_torch(tmp_path / "none.pth")
