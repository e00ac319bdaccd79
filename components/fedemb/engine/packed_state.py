"""Working state of an attempt as one file: what JSON can say, and arrays beside it."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Mapping

import numpy as np

from fedemb.foundation.canonical_json import JsonObject

_HEAD = "head"


def pack(head: Mapping[str, object], arrays: Mapping[str, np.ndarray]) -> bytes:
    """Packs a JSON object and arrays; no array is called `head`."""
    packed = io.BytesIO()
    text = np.frombuffer(json.dumps(head).encode(), np.uint8)
    np.savez(packed, allow_pickle=False, **{_HEAD: text}, **arrays)
    return packed.getvalue()


def unpack(data: bytes, *names: str) -> tuple[JsonObject, dict[str, np.ndarray]]:
    """The object of `pack`, and the arrays of these names.

    Raises:
      ValueError: it was cut or changed, or lacks an array.
    """
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as packed:
            return json.loads(packed[_HEAD].tobytes()), {name: packed[name] for name in names}
    except (KeyError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError("the bytes are not a packed state") from error
