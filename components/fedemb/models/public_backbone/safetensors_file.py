"""Reads the tensors of a safetensors file: a JSON header and plain numbers."""

from __future__ import annotations

import io
import struct
from math import prod
from pathlib import Path

import numpy as np

from fedemb.errors import ArtifactError, FedEmbError, InputError
from fedemb.foundation.canonical_json import Json, json_object
from fedemb.foundation.files import open_regular
from fedemb.models.public_backbone.torch_file import LARGEST

_LARGEST_HEADER = 16 << 20
_KINDS = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "BF16": "<u2",
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "I8": "i1",
    "U8": "u1",
    "BOOL": "?",
}


class _Malformed(ValueError):
    """The header does not match the file."""


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
    """Returns the tensors of a safetensors file, by name. Tensors in bfloat16 become float32.

    Raises:
      InputError: the file does not exist or is too large.
      ArtifactError: the file is not a safetensors file, or its header does not match its numbers.
    """
    try:
        with open_regular(path) as file:
            size = file.seek(0, io.SEEK_END)
            if size > LARGEST:
                raise InputError(
                    f"{path} has {size:,} bytes, at most {LARGEST:,} are read. Use a smaller "
                    "file of weights"
                )
            file.seek(0)
            (length,) = struct.unpack("<Q", file.read(8))
            if length > min(_LARGEST_HEADER, size - 8):
                raise _Malformed("its header is longer than the file or 16 MiB")
            header = json_object(file.read(length), f"the header of {path.name}")
            numbers = file.read()
        return {
            name: _tensor(entry, numbers)
            for name, entry in header.items()
            if name != "__metadata__"
        }
    except FileNotFoundError as error:
        raise InputError(f"{path} does not exist. Name a file of weights") from error
    except FedEmbError:
        raise
    except (OSError, ValueError, TypeError, KeyError, AttributeError, struct.error) as error:
        raise ArtifactError(
            f"{path.name} is not a readable safetensors file ({error}). Use another file"
        ) from error


def _fields(entry: Json) -> tuple[str, list[int], int, int]:
    """Returns the type, the shape, and the first and last byte of a tensor."""
    match entry:
        case {"dtype": str(kind), "shape": list(shape), "data_offsets": [start, end]}:
            whole = [one for one in (*shape, start, end) if type(one) is int and one >= 0]
            if len(whole) == len(shape) + 2:
                return kind, whole[:-2], whole[-2], whole[-1]
        case _:
            pass
    raise _Malformed("the header describes a tensor in another way")


def _tensor(entry: Json, numbers: bytes) -> np.ndarray:
    kind, shape, start, end = _fields(entry)
    width = np.dtype(_KINDS[kind]).itemsize
    if not start <= end <= len(numbers) or end - start != width * prod(shape):
        raise _Malformed("a tensor lies outside of the file")
    found = np.frombuffer(numbers[start:end], _KINDS[kind])
    if kind == "BF16":  # the upper half of a float32
        found = (found.astype("<u4") << 16).view("<f4")
    return found.reshape(shape)
