"""Artifacts: canonical JSON, digests, and the three kinds that never mix.

`Raw` is private data and anything un-noised computed from it; `Noised` is output of the mechanism;
`Public` is everything else. The kinds are types, so that a function which publishes can take
`Noised | Public` and a type checker, as well as `require_publishable`, refuses a `Raw`.
"""

# ruff: noqa: PLC0414 - what writes files moved to fedemb.files, and is imported from here too

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedemb.config import FREE_SECTIONS, RunConfig
from fedemb.errors import ArtifactError, Refused
from fedemb.files import create_bytes as create_bytes
from fedemb.files import make_folder as make_folder
from fedemb.files import remove_leftovers as remove_leftovers
from fedemb.files import require_folder as require_folder
from fedemb.files import write_bytes as write_bytes
from fedemb.files import write_error as write_error


@dataclass(frozen=True)
class Artifact:
    """A file or folder written by one step."""

    path: Path


@dataclass(frozen=True)
class Raw(Artifact):
    """Private: lives below the private root, never in the pipeline UI, never in a bundle."""


@dataclass(frozen=True)
class Noised(Artifact):
    """Output of the mechanism: may be published once the gate allows it."""


@dataclass(frozen=True)
class Public(Artifact):
    """Computed from public constants and noised outputs alone."""


def require_publishable(*artifacts: Artifact) -> None:
    """Refuses anything that is not `Noised` or `Public`.

    Raises:
      Refused: one of them is raw.
    """
    for artifact in artifacts:
        if not isinstance(artifact, Noised | Public):
            raise Refused(
                f"{artifact.path.name} is {type(artifact).__name__}, and only Noised or Public "
                "artifacts may be published; leave it out"
            )


def canonical_json(value: Any) -> bytes:
    """Returns the one byte string of a JSON value: sorted keys, no spaces, UTF-8, no NaN.

    Raises:
      ArtifactError: the value holds NaN, infinity, half a character or something JSON has no word
        for.
    """
    try:
        text = json.dumps(
            value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
        )
        return text.encode()
    except (TypeError, ValueError) as error:  # a lone surrogate is a ValueError too
        raise ArtifactError(f"this value cannot be written as canonical JSON: {error}") from error


def sha256_hex(data: bytes) -> str:
    """SHA-256 of bytes, 64 lower-case hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


def json_digest(value: Any) -> str:
    """SHA-256 of the canonical JSON of a value.

    For public values only; private ones get keyed commitments (docs/design.md#the-way-of-the-data).
    """
    return sha256_hex(canonical_json(value))


def config_digest(config: RunConfig, *free: str) -> str:
    """SHA-256 of what a reservation binds of a configuration: the `config_sha` of documents.

    Args:
      config: the configuration; what an older version wrote is read by `RunConfig.as_written`.
      *free: names of free sections to bind as well. A utility report binds `evaluation` and an
        audit report `audit`, so that neither passes for one that was made otherwise.
    """
    left_out = {name for name in FREE_SECTIONS if name not in free}
    return json_digest(config.model_dump(mode="json", exclude=left_out))


def file_digest(path: Path) -> str:
    """SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def limited_digest(path: Path, size: int) -> str:
    """SHA-256 of a file of at most so many bytes; reads one more byte at most.

    Raises:
      ArtifactError: the file is larger.
    """
    digest, left = hashlib.sha256(), size
    with path.open("rb") as file:
        while data := file.read(min(_PIECE, left + 1)):
            left -= len(data)
            if left < 0:
                raise ArtifactError(
                    f"{path.name} has more than the {size} bytes it may have; fetch it again"
                )
            digest.update(data)
    return digest.hexdigest()


def tree_digests(root: Path) -> dict[str, str]:
    """Maps every file below `root` (POSIX path relative to it, sorted) to its SHA-256."""
    files = sorted(path for path in root.rglob("*") if path.is_file())
    return {path.relative_to(root).as_posix(): file_digest(path) for path in files}


def tree_digest(root: Path) -> str:
    """One digest of all files below `root` and their names."""
    return json_digest(tree_digests(root))


def write_json(path: Path, schema: str, body: Mapping[str, Any]) -> None:
    """Writes a document `{"schema": schema, **body}` atomically, indented for people.

    `schema` is `fedemb/<artifact>/<version>`.
    """
    document = {"schema": schema, **body}
    text = json.dumps(document, sort_keys=True, indent=1, ensure_ascii=False, allow_nan=False)
    write_bytes(path, text.encode() + b"\n")


_PIECE = 1 << 20
"""Bytes of a file read at once."""
LARGEST_JSON = 64 << 20
"""Bytes of one JSON text; the largest we write, a ledger record of many blocks, has a few."""
_DEEPEST = 64
"""Objects and lists inside one another."""


def _refuse(constant: str) -> float:
    raise ValueError(f"it holds {constant}, which is not a number")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("it holds a key twice")
    return found


_STRICT = json.JSONDecoder(parse_constant=_refuse, object_pairs_hook=_once)
"""Made once: ten thousand records are parsed in a third of the time."""


def _too_deep(value: Any) -> bool:
    level: list[Any] = [value]
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


def strict_json(data: bytes, name: str) -> Any:
    """Parses JSON that holds no key twice, no NaN, no half of a character, and not too much.

    Raises:
      ArtifactError: not such JSON in UTF-8.
    """
    try:
        if len(data) > LARGEST_JSON:
            raise ValueError(f"{len(data)} bytes, at most {LARGEST_JSON}")
        text = data.decode()
        value = _STRICT.decode(text)
        if _too_deep(value):
            raise ValueError("nested without end")
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()  # refuses half of a character
    except (ValueError, RecursionError) as error:
        why = "nested without end" if isinstance(error, RecursionError) else error
        raise ArtifactError(
            f"{name} is not JSON as we write it ({why}); write it again with the step that owns it"
        ) from error
    return value


def parse_json(data: bytes, schema: str, name: str) -> dict[str, Any]:
    """Parses a JSON object and checks its schema.

    Raises:
      ArtifactError: not JSON in UTF-8, holds NaN or a key twice, or of another schema or version.
    """
    document = strict_json(data, name)
    found = document.get("schema") if isinstance(document, dict) else None
    if found != schema:
        raise ArtifactError(
            f"{name} has schema {found!r}, expected {schema!r}; run the step that writes it with "
            "this version of the package"
        )
    return document


def read_json(path: Path, schema: str) -> dict[str, Any]:
    """Reads a document written by `write_json`.

    Raises:
      ArtifactError: missing, not JSON, or of another schema or version.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise ArtifactError(
            f"{path.name} is missing in {path.parent}; run the step that writes it"
        ) from error
    return parse_json(data, schema, path.name)
