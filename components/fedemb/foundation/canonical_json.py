"""Canonical and strict JSON, and its digests."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias, cast

from fedemb.errors import ArtifactError
from fedemb.foundation.files import open_regular

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"
"""A JSON value as it is parsed."""
JsonObject: TypeAlias = dict[str, Json]
ToJson: TypeAlias = "bool | int | float | str | Sequence[ToJson] | Mapping[str, ToJson] | None"
"""A value that can be written as JSON."""
JsonFields: TypeAlias = Mapping[str, ToJson]
"""Fields of an object that is written as JSON; they are not changed."""
_CANONICAL = json.JSONEncoder(
    sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
)
"""Shared encoder: a ledger has ten thousands of records."""


def canonical_json(value: ToJson) -> bytes:
    """Returns the canonical bytes of a JSON value: sorted keys, no spaces, UTF-8, no NaN.

    Raises:
      ArtifactError: the value contains NaN, infinity, a lone surrogate, or a type that JSON does
        not support.
    """
    try:
        return _CANONICAL.encode(value).encode()
    except (TypeError, ValueError) as error:  # a lone surrogate is a ValueError too
        raise ArtifactError(f"this value cannot be written as canonical JSON: {error}") from error


def sha256_hex(data: bytes) -> str:
    """Returns the SHA-256 of bytes, 64 lower-case hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


def json_digest(value: ToJson) -> str:
    """Returns the SHA-256 of the canonical JSON of a value.

    Use it for public values only; private values need keyed commitments
    (docs/explanation/how_it_works.md#data-flow).
    """
    return sha256_hex(canonical_json(value))


LARGEST_JSON = 64 << 20
"""Maximum bytes of a JSON text; the largest one written, a ledger record, has a few MiB."""


_DEEPEST = 64
"""Maximum nesting depth of objects and lists."""


def _refuse(constant: str) -> float:
    raise ValueError(f"it holds {constant}, which is not a number")


def _once(pairs: list[tuple[str, Json]]) -> JsonObject:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("it holds a key twice")
    return found


_STRICT = json.JSONDecoder(parse_constant=_refuse, object_pairs_hook=_once)
"""Shared decoder: parsing ten thousand records takes a third of the time."""


def _too_deep(value: Json) -> bool:
    level: list[Json] = [value]
    for _ in range(_DEEPEST):
        level = [
            child
            for item in level
            if isinstance(item, dict | list)
            for child in (item.values() if isinstance(item, dict) else item)
        ]
        if not level:
            return False
    return True


def strict_json(data: bytes, name: str) -> Json:
    """Parses strict JSON: no repeated keys, no NaN, no lone surrogates, limited size and depth.

    Raises:
      ArtifactError: the bytes are not strict JSON in UTF-8.
    """
    try:
        if len(data) > LARGEST_JSON:
            raise ValueError(f"{len(data)} bytes, at most {LARGEST_JSON}")
        text = data.decode()
        value = cast("Json", _STRICT.decode(text))
        brackets = data.count(b"{") + data.count(b"[")  # no deeper than that, text included
        if brackets > _DEEPEST and _too_deep(value):
            raise ValueError("nested without end")
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()  # refuses a lone surrogate
    except (ValueError, RecursionError) as error:
        why = "nested without end" if isinstance(error, RecursionError) else error
        raise ArtifactError(
            f"{name} is not JSON as we write it ({why}); write it again with the step that owns it"
        ) from error
    return value


def json_object(data: bytes, name: str) -> JsonObject:
    """Parses a strict JSON object; see `strict_json`.

    Raises:
      ArtifactError: the bytes are not strict JSON in UTF-8, or not an object.
    """
    value = strict_json(data, name)
    if not isinstance(value, dict):
        raise ArtifactError(f"{name} is not a JSON object; run the step that writes it again")
    return value


def parse_json(data: bytes, schema: str, name: str) -> JsonObject:
    """Parses a JSON object and checks its schema.

    Raises:
      ArtifactError: the bytes are not JSON in UTF-8, contain NaN or a repeated key, or have another
        schema or version.
    """
    document = strict_json(data, name)
    found = document.get("schema") if isinstance(document, dict) else None
    if not isinstance(document, dict) or found != schema:
        raise ArtifactError(
            f"{name} has schema {found!r}, expected {schema!r}; run the step that writes it with "
            "this version of the package"
        )
    return document


def file_digest(path: Path) -> str:
    """Returns the SHA-256 of a file's bytes."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def limited_digest(path: Path, size: int) -> str:
    """Returns the SHA-256 of a file of at most `size` bytes; reads at most `size` + 1 bytes.

    Raises:
      ArtifactError: the file is larger.
    """
    digest, left = hashlib.sha256(), size
    with open_regular(path) as file:
        while data := file.read(min(_PIECE, left + 1)):
            left -= len(data)
            if left < 0:
                raise ArtifactError(
                    f"{path.name} is larger than the expected {size} bytes. Fetch it again."
                )
            digest.update(data)
    return digest.hexdigest()


def tree_digests(root: Path) -> dict[str, str]:
    """Returns the SHA-256 of every file below `root`, by sorted POSIX path relative to `root`."""
    files = sorted(path for path in root.rglob("*") if path.is_file())
    return {path.relative_to(root).as_posix(): file_digest(path) for path in files}


def tree_digest(root: Path) -> str:
    """Returns one digest of all files below `root` and their names."""
    return json_digest(tree_digests(root))


_PIECE = 1 << 20
"""Number of bytes read at once."""
