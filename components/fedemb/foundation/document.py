"""Model of all documents that are signed or read back.

A document is a class with a `kind`. In a file it is the JSON object
`{"schema": "fedemb/<kind>/1", **fields, "signature": ...}`. Reading refuses another schema, an
unknown field, a missing field, a number that is not finite, a repeated key, another
spelling of the same content, and content above the size limits.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Generic, Self, TypeAlias, TypeVar, Unpack

from pydantic import BaseModel, ConfigDict, ValidationError
from typing_extensions import override

from fedemb.errors import ArtifactError
from fedemb.foundation.canonical_json import (
    Json,
    JsonObject,
    ToJson,
    canonical_json,
    json_object,
    parse_json,
    sha256_hex,
)
from fedemb.foundation.files import read_regular, write_bytes

_LONGEST_SIGNATURE = 256
"""Maximum characters of a field of a signature."""


class Part(BaseModel):
    """Object inside a document: all fields are required, and their types are strict."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    @classmethod
    @override
    def __pydantic_init_subclass__(cls, **kwargs: Unpack[ConfigDict]) -> None:
        """Refuses optional fields: a document without one would be read as another."""
        optional = [name for name, field in cls.model_fields.items() if not field.is_required()]
        if optional:
            raise TypeError(
                f"{cls.__name__}.{optional[0]} has a default, and every field of a document is "
                "written; remove the default"
            )


class Document(Part):
    """A document of one kind."""

    kind: ClassVar[str]
    compact: ClassVar[bool] = False
    """Whether the document is written as one line of canonical JSON instead of indented."""
    role: ClassVar[str | None] = None
    """Role whose key signs the document; None: only one step writes and reads it, unsigned."""

    @classmethod
    def schema_name(cls) -> str:
        """Returns the value of `schema` in the document's file."""
        return f"fedemb/{cls.kind}/1"

    def content(self) -> JsonObject:
        """Returns the JSON object without its signature, which is the signed content."""
        return {"schema": self.schema_name(), **self.model_dump(mode="json")}

    @classmethod
    def of_fields(cls, fields: Mapping[str, object]) -> Self:
        """Returns a document from JSON fields.

        Raises:
          ArtifactError: a field is missing, unknown or malformed; the message names the field.
        """
        try:
            return cls.model_validate(dict(fields))
        except ValidationError as error:
            raise ArtifactError(
                f"{problem_of(error)} of a {cls.kind} document is unknown, missing or not of its "
                "form; run the step that writes it again with this version"
            ) from error


Fields: TypeAlias = dict[str, object]
"""Fields of a document that its class has not checked yet; see `Document.of_fields`."""
D = TypeVar("D", bound=Document)
D_co = TypeVar("D_co", bound=Document, covariant=True)


@dataclass(frozen=True)
class Written(Generic[D_co]):
    """A document as stored in a file: content, signature and exact bytes."""

    body: D_co
    signature: Mapping[str, str] | None
    data: bytes

    @functools.cached_property
    def sha(self) -> str:
        """Returns the SHA-256 of the bytes."""
        return sha256_hex(self.data)

    @functools.cached_property
    def content(self) -> JsonObject:
        """Returns the content that the signature covers."""
        return self.body.content()

    @functools.cached_property
    def _canonical(self) -> tuple[bytes, bytes]:
        """Returns the canonical JSON of the content, and that with the signature inserted."""
        content, signature = self.content, self.signature
        if signature is None:
            return (whole := canonical_json(content)), whole
        before = {name: value for name, value in content.items() if name < "signature"}
        after = {name: value for name, value in content.items() if name > "signature"}
        head, tail = canonical_json(before)[1:-1], canonical_json(after)[1:-1]
        signed = canonical_json({"signature": dict(signature)})[1:-1]
        # Keys are sorted, so the signature has its place between the two.
        return _joined(head, tail), _joined(head, signed, tail)

    @property
    def signed_bytes(self) -> bytes:
        """Returns the canonical JSON of the content, which the signature covers."""
        return self._canonical[0]

    @property
    def is_exact(self) -> bool:
        """Whether the stored bytes are those that `written` returns for the content."""
        if self.body.compact:
            return self._canonical[1] == self.data
        return encode(self.json) == self.data

    @property
    def json(self) -> JsonObject:
        """Returns the whole JSON object, including the signature."""
        return self.content if self.signature is None else _signed(self.content, self.signature)


def _joined(*members: bytes) -> bytes:
    return b"{" + b",".join(filter(None, members)) + b"}"


def _signed(content: JsonObject, signature: Mapping[str, str]) -> JsonObject:
    return {**content, "signature": {**signature}}


def encode(content: Mapping[str, ToJson], *, compact: bool = False) -> bytes:
    """Returns the bytes of a document's JSON object: sorted keys, on one line or indented.

    Raises:
      ArtifactError: the content has NaN, infinity, a lone surrogate, or a type that JSON does not
        support.
    """
    if compact:
        return canonical_json(content)
    try:
        text = json.dumps(content, sort_keys=True, indent=1, ensure_ascii=False, allow_nan=False)
        return text.encode() + b"\n"
    except (TypeError, ValueError) as error:  # a lone surrogate is a ValueError too
        raise ArtifactError(f"this document cannot be written as JSON: {error}") from error


def written(document: D, signature: Mapping[str, str] | None = None) -> Written[D]:
    """Returns a document and its signature in the form to be written."""
    content = document.content()
    whole = content if signature is None else _signed(content, signature)
    data = encode(whole, compact=document.compact)
    return Written(document, signature, data)


def parse(data: bytes, expected: type[D], name: str, *, exact: bool = True) -> Written[D]:
    """Reads the bytes of a document; its signature is checked by a `TrustStore`.

    Args:
      data: the bytes, which must equal those that `written` returns for their content.
      expected: class of the document.
      name: name of the file, for the error message.
      exact: False skips the comparison of the bytes with those of `written`; the caller must check.

    Raises:
      ArtifactError: the document has another schema, an unknown or missing field, or bytes
        that are not canonical (blanks, repeated keys, another spelling of a number).
    """
    what = f"the {expected.kind} document {name}"
    fields = json_object(data, what)
    schema = fields.pop("schema", None)
    if schema != expected.schema_name():
        raise ArtifactError(
            f"{what} has schema {str(schema)[:60]!r}, expected {expected.schema_name()}; run the "
            "step that writes it with this version of the package"
        )
    signature = _signature(fields.pop("signature", None), what)
    try:
        body = expected.model_validate(fields)
    except ValidationError as error:
        raise ArtifactError(
            f"{problem_of(error)} of {what} is unknown, missing or not of its form; run its step "
            "again with this version"
        ) from error
    result = Written(body, signature, data)
    if exact and not result.is_exact:
        raise ArtifactError(f"{what} was changed after it was written; run its step again")
    return result


def read(path: Path, expected: type[D]) -> Written[D]:
    """Reads a document's file; see `parse`."""
    try:
        data = read_regular(path)
    except OSError as error:
        raise ArtifactError(
            f"the {expected.kind} document {path.name} cannot be read; run the step that writes it"
        ) from error
    return parse(data, expected, path.name)


def write(path: Path, document: D, signature: Mapping[str, str] | None = None) -> Written[D]:
    """Writes a document's file and returns it as written."""
    result = written(document, signature)
    write_bytes(path, result.data)
    return result


def problem_of(error: ValidationError) -> str:
    """Returns the first invalid field. Unknown fields are not named, as they can be anything."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    place = [str(part) for part in first["loc"]]
    if first["type"] == "extra_forbidden":
        place.pop()
    return ".".join(part for part in place if re.fullmatch("[a-z0-9_]{1,40}", part)) or "a field"


def _signature(value: Json, what: str) -> dict[str, str] | None:
    if value is None:
        return None
    fields = value if isinstance(value, dict) else {}
    texts = {
        name: text
        for name, text in fields.items()
        if isinstance(text, str) and len(text) <= _LONGEST_SIGNATURE
    }
    if texts.keys() != {"key_id", "algorithm", "value"} or texts.keys() != fields.keys():
        raise ArtifactError(f"the signature of {what} is malformed; run its step again")
    return texts


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
        data = read_regular(path)
    except OSError as error:
        raise ArtifactError(
            f"{path.name} is missing in {path.parent} or cannot be read; run the step that writes "
            "it"
        ) from error
    return parse_json(data, schema, path.name)
