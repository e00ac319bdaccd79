"""JSON documents in files, written atomically."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from fedemb.errors import ArtifactError
from fedemb.foundation.canonical_json import JsonObject, ToJson, parse_json
from fedemb.foundation.document import encode
from fedemb.foundation.files import write_bytes


def write_json(path: Path, schema: str, body: Mapping[str, ToJson]) -> None:
    """Writes a document `{"schema": schema, **body}` atomically, indented for people.

    `schema` is `fedemb/<artifact>/<version>`.
    """
    write_bytes(path, encode({"schema": schema, **body}))


def read_json(path: Path, schema: str) -> JsonObject:
    """Reads a document written by `write_json`.

    Raises:
      ArtifactError: the file is missing, is not JSON, or has another schema or version.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise ArtifactError(
            f"{path.name} is missing in {path.parent}; run the step that writes it"
        ) from error
    return parse_json(data, schema, path.name)
