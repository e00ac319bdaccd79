"""Reads the tensors of a PyTorch file without PyTorch, and without running code from the file.

A PyTorch file is a pickle, and a pickle can call any function. The reader here resolves only
tensors, their storages and ordered dictionaries, and refuses every other global. Both layouts are
read: the zip archive of PyTorch 1.6 and later, and the stream of pickles before it.
"""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from typing_extensions import override

from fedemb.errors import ArtifactError, FedEmbError, InputError
from fedemb.foundation.files import open_regular

LARGEST = 4 << 30
"""Maximum bytes of a file of weights."""
_LARGEST_PICKLE = 64 << 20
"""Maximum bytes of a pickle without its numbers; a state dict has a few hundred kilobytes."""
_MAGIC, _PROTOCOL = 0x1950A86A20F9469CFC6C, 1001
_KINDS = {
    "DoubleStorage": "<f8",
    "FloatStorage": "<f4",
    "HalfStorage": "<f2",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "<i8",
    "IntStorage": "<i4",
    "ShortStorage": "<i2",
    "CharStorage": "i1",
    "ByteStorage": "u1",
    "BoolStorage": "?",
}
"""Number format of each storage class. The marker `bfloat16` is converted to float32."""
_NESTED = ("state_dict", "model", "model_state_dict")
"""Keys under which training scripts put the state dict."""


@dataclass(frozen=True)
class _Kind:
    """A storage class of PyTorch. Not callable, so a pickle cannot make an object of it."""

    name: str


@dataclass(frozen=True)
class _Storage:
    kind: str
    key: str
    count: int


@dataclass(frozen=True)
class _View:
    """A tensor: a strided view of a storage."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _Malformed(Exception):
    """The pickle has an object that is not part of a state dict."""


def read_torch(path: Path) -> dict[str, np.ndarray]:
    """Returns the tensors of a state dict in a PyTorch file.

    Args:
      path: `.pth`, `.pt` or `.bin` file. A dictionary under `state_dict`, `model` or
        `model_state_dict` is used if the file has one.

    Returns:
      Arrays by tensor name. Tensors in bfloat16 become float32.

    Raises:
      InputError: the file does not exist or is too large.
      ArtifactError: the file is damaged, has another global than a tensor, or is not a state dict.
    """
    try:
        with open_regular(path) as file:
            size = file.seek(0, io.SEEK_END)
            file.seek(0)
            if size > LARGEST:
                raise InputError(
                    f"{path} has {size:,} bytes, at most {LARGEST:,} are read. Use a smaller "
                    "file of weights"
                )
            zipped = file.read(4) == b"PK\x03\x04"
            file.seek(0)
            return _zipped(file, size) if zipped else _stream(file, size)
    except FedEmbError:
        raise
    except FileNotFoundError as error:
        raise InputError(f"{path} does not exist. Name a file of weights") from error
    except Exception as error:  # a damaged pickle can raise any type
        why = error if isinstance(error, _Malformed) else f"it is damaged ({type(error).__name__})"
        raise ArtifactError(
            f"{path.name} is not a PyTorch state dict that can be read safely: {why}. Use a file "
            "of tensors only"
        ) from error


class _Unpickler(pickle.Unpickler):
    """Unpickler that knows tensors, storages and ordered dictionaries, and no other global."""

    @override
    def find_class(self, module: str, name: str, /) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _view
        if (module, name) == ("torch._utils", "_rebuild_parameter"):
            return _parameter
        if module == "torch" and name in _KINDS:
            return _Kind(name)
        raise _Malformed(f"it has the global {f'{module}.{name}'[:80]!r}, which is not a tensor")

    @override
    def persistent_load(self, pid: Any, /) -> Any:
        match pid:
            case ("storage", _Kind(kind), str(key), _, int(count), *views) if count >= 0:
                if views in ([], [None]):
                    return _Storage(kind, key, count)
            case _:
                pass
        raise _Malformed("it has a storage that is not a tensor's")


def _view(storage: Any, offset: Any, shape: Any, strides: Any, *_: Any) -> _View:
    numbers = (offset, *shape, *strides)
    sound = isinstance(storage, _Storage) and len(shape) == len(strides)
    if not sound or not all(type(one) is int and 0 <= one < LARGEST for one in numbers):
        raise _Malformed("it has a tensor of impossible shape")
    last = offset + sum((size - 1) * step for size, step in zip(shape, strides, strict=True))
    count = prod(shape)
    if (count and last >= storage.count) or count > max(storage.count, 1):
        raise _Malformed("it has a tensor outside of its storage")
    return _View(storage, offset, tuple(shape), tuple(strides))


def _parameter(data: Any, *_: Any) -> Any:
    return data


def _loaded(file: Any) -> Any:
    return _Unpickler(file).load()


def _stream(file: BinaryIO, size: int) -> dict[str, np.ndarray]:
    """Reads the layout before PyTorch 1.6: five pickles, then the numbers of each storage."""
    magic, protocol, system = (_loaded(file) for _ in range(3))
    if magic != _MAGIC or protocol != _PROTOCOL or not system.get("little_endian"):
        raise _Malformed("it has no header of PyTorch")
    views = _state_dict(_loaded(file))
    keys = _loaded(file)
    storages = {view.storage.key: view.storage for view in views.values()}
    numbers: dict[str, np.ndarray] = {}
    for key in keys:
        (count,) = struct.unpack("<q", file.read(8))
        storage = storages.get(key)
        if storage is None:
            raise _Malformed("it has a storage that no tensor uses")
        length = count * _width(storage.kind)
        if count != storage.count or length > size:
            raise _Malformed("it has a storage of another size than its tensors")
        numbers[key] = _numbers(file.read(length), storage)
    return {name: _array(view, numbers[view.storage.key]) for name, view in views.items()}


def _zipped(file: BinaryIO, size: int) -> dict[str, np.ndarray]:
    """Reads the layout since PyTorch 1.6: a zip archive with a pickle and one member a storage."""
    with zipfile.ZipFile(file) as archive:
        (name,) = (name for name in archive.namelist() if name.split("/")[1:] == ["data.pkl"])
        folder = name.split("/")[0]

        def member(inner: str, limit: int) -> bytes:
            info = archive.getinfo(f"{folder}/{inner}")
            if info.compress_type != zipfile.ZIP_STORED or info.file_size > limit:
                raise _Malformed(f"its member {inner[:40]!r} is compressed or too large")
            return archive.read(info)

        names = archive.namelist()
        if f"{folder}/byteorder" in names and member("byteorder", 16) != b"little":
            raise _Malformed("its numbers are big-endian")
        views = _state_dict(_loaded(io.BytesIO(member("data.pkl", _LARGEST_PICKLE))))
        storages = {view.storage.key: view.storage for view in views.values()}
        if sum(archive.getinfo(f"{folder}/data/{key}").file_size for key in storages) > size:
            raise _Malformed("its members overlap")
        numbers = {
            key: _numbers(member(f"data/{key}", size), storage) for key, storage in storages.items()
        }
    return {name: _array(view, numbers[view.storage.key]) for name, view in views.items()}


def _state_dict(found: Any) -> dict[str, _View]:
    """Returns the tensors of an unpickled object, by name."""
    if isinstance(found, Mapping):
        inner = [found[key] for key in _NESTED if isinstance(found.get(key), Mapping)]
        found = inner[0] if inner else found
    if not isinstance(found, Mapping) or not found:
        raise _Malformed("it has no dictionary of tensors")
    tensors = {name: view for name, view in found.items() if isinstance(view, _View)}
    if tensors.keys() != found.keys() or not all(isinstance(name, str) for name in tensors):
        raise _Malformed("it has other values beside its tensors")
    stored = sum({view.storage.key: view.storage.count for view in tensors.values()}.values())
    if sum(prod(view.shape) for view in tensors.values()) > 2 * stored + len(tensors):
        raise _Malformed("its tensors share their numbers many times")
    return tensors


def _width(kind: str) -> int:
    return 2 if _KINDS[kind] == "bfloat16" else np.dtype(_KINDS[kind]).itemsize


def _numbers(data: bytes, storage: _Storage) -> np.ndarray:
    if len(data) != storage.count * _width(storage.kind):
        raise _Malformed("it has a storage of another size than its tensors")
    if _KINDS[storage.kind] == "bfloat16":  # the upper half of a float32
        return (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4")
    return np.frombuffer(data, _KINDS[storage.kind])


def _array(view: _View, numbers: np.ndarray) -> np.ndarray:
    if view.storage.count != len(numbers):
        raise _Malformed("it has a storage of another size than its tensors")
    strides = [step * numbers.itemsize for step in view.strides]
    window = numbers[view.offset :]
    return np.lib.stride_tricks.as_strided(window, view.shape, strides, writeable=False).copy()
