"""Writes PyTorch files without PyTorch: both layouts, and pickles that hold something else."""

import io
import pickle
import struct
import sys
import types
import zipfile
from collections import OrderedDict
from contextlib import contextmanager

import numpy as np

MAGIC, PROTOCOL = 0x1950A86A20F9469CFC6C, 1001
KINDS = {"f4": "FloatStorage", "f8": "DoubleStorage", "f2": "HalfStorage", "i8": "LongStorage"}


class _Tensor:
    """Pickled like `torch.Tensor`."""

    def __init__(self, key, array, kind=None):
        self.key, self.array = key, array
        self.kind = kind or KINDS[array.dtype.str[1:]]

    def __reduce__(self):
        strides = tuple(step // self.array.itemsize for step in self.array.strides)
        storage = _Storage(self.kind, self.key, self.array.size)
        arguments = (storage, 0, self.array.shape, strides, False, OrderedDict())
        return sys.modules["torch._utils"]._rebuild_tensor_v2, arguments


class _Storage:
    def __init__(self, kind, key, count):
        self.kind, self.key, self.count = kind, key, count


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj):
        if isinstance(obj, _Storage):
            marker = getattr(sys.modules["torch"], obj.kind)
            return ("storage", marker, obj.key, "cpu", obj.count, *self.more)
        return None

    more = ()


@contextmanager
def _pretended_torch():
    """`torch` for the pickler, which looks up each global that it writes."""
    torch, utils = types.ModuleType("torch"), types.ModuleType("torch._utils")
    for kind in (*KINDS.values(), "BFloat16Storage"):
        setattr(torch, kind, type(kind, (), {"__module__": "torch"}))

    def _rebuild_tensor_v2():
        """Only its name is written."""

    _rebuild_tensor_v2.__module__ = "torch._utils"
    _rebuild_tensor_v2.__qualname__ = "_rebuild_tensor_v2"
    utils._rebuild_tensor_v2 = _rebuild_tensor_v2
    sys.modules |= {"torch": torch, "torch._utils": utils}
    try:
        yield
    finally:
        for name in ("torch", "torch._utils"):
            del sys.modules[name]


def _pickled(value, more=()):
    packed = io.BytesIO()
    pickler = _Pickler(packed, protocol=2)
    pickler.more = more
    pickler.dump(value)
    return packed.getvalue()


def tensors_of(arrays):
    """State dict of arrays by name, to be pickled."""
    arrays = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    return OrderedDict(
        (name, _Tensor(str(number), array)) for number, (name, array) in enumerate(arrays.items())
    )


def write_stream(path, state):
    """Writes the layout before PyTorch 1.6."""
    found = [item for item in state.values() if isinstance(item, _Tensor)]
    with _pretended_torch():
        parts = [pickle.dumps(MAGIC, 2), pickle.dumps(PROTOCOL, 2)]
        parts.append(pickle.dumps({"little_endian": True}, 2))
        parts += [_pickled(state, (None,)), pickle.dumps([one.key for one in found], 2)]
    for one in found:
        parts += [struct.pack("<q", one.array.size), one.array.tobytes()]
    path.write_bytes(b"".join(parts))
    return path


def write_zip(path, state, compression=zipfile.ZIP_STORED):
    """Writes the layout since PyTorch 1.6."""
    with _pretended_torch():
        packed = _pickled(state)
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("net/data.pkl", packed)
        archive.writestr("net/byteorder", "little")
        for key, array in {one.key: one.array for one in _all_tensors(state)}.items():
            archive.writestr(f"net/data/{key}", array.tobytes("A"))
    return path


def _all_tensors(state):
    for value in state.values():
        if isinstance(value, _Tensor):
            yield value
        elif isinstance(value, dict):
            yield from _all_tensors(value)


def bfloat16(array):
    """A tensor in bfloat16: the upper half of each float32."""
    upper = (np.ascontiguousarray(array, np.float32).view("<u4") >> 16).astype("<u2")
    return _Tensor("0", upper, "BFloat16Storage")
