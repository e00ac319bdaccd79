"""Model of all documents that are signed or read back: strict, versioned and extensible.

A document is a class with a `kind` and a newest version. In a file it is the JSON object
`{"schema": "fedemb/<kind>/<version>", **fields, "signature": ...}`. Reading refuses an unknown
kind, version or field, a missing field, a number that is not finite, a repeated key, another
spelling of the same content, and content above the size limits.

A later version can add a field, and files of older versions stay readable:

    class UtilityReport(Document):
        kind: ClassVar[str] = "utility_report"
        newest: ClassVar[int] = 2
        images_per_second: Annotated[float | None, Since(2, before=None)]

A file of version 1 must not have the field and is read with the value `before`. A file of version 2
must have it. A field is never removed and never changes its meaning. `Renamed` marks a field that
had another name in older versions.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Generic, Self, TypeAlias, TypedDict, TypeVar, Unpack, cast

from pydantic import (
    BaseModel,
    ConfigDict,
    SerializationInfo,
    ValidationError,
    ValidationInfo,
    model_serializer,
    model_validator,
)
from pydantic_core.core_schema import SerializerFunctionWrapHandler
from typing_extensions import override

from fedemb.errors import ArtifactError, LaterVersion
from fedemb.foundation.canonical_json import (
    Json,
    JsonObject,
    ToJson,
    canonical_json,
    json_object,
    sha256_hex,
)
from fedemb.foundation.files import write_bytes

_LONGEST_SIGNATURE = 256
"""Maximum characters of a field of a signature."""
_SCHEMA = re.compile(r"fedemb/([a-z_]{1,40})/([1-9][0-9]{0,3})")


@dataclass(frozen=True)
class Since:
    """Annotation of a field that was added in a version of the document."""

    version: int
    before: Json
    """Value of the field in older documents, as JSON."""


@dataclass(frozen=True)
class Renamed:
    """Annotation of a field that had another name before a version of the document."""

    since: Mapping[str, int]
    """Kind of document -> version that introduced the new name, for a part of several documents."""
    before: str
    """Name of the field in older documents."""


class _Context(TypedDict):
    """Document that a part is read from or written to."""

    kind: str
    version: int


@functools.cache
def _late_fields(part: type[Part], kind: str, version: int) -> dict[str, Since | Renamed]:
    return {
        name: mark
        for name, field in part.model_fields.items()
        for mark in field.metadata
        if (isinstance(mark, Since) and mark.version > version)
        or (isinstance(mark, Renamed) and mark.since[kind] > version)
    }


class Part(BaseModel):
    """Object inside a document: all fields are required, and their types are strict."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    @classmethod
    @override
    def __pydantic_init_subclass__(cls, **kwargs: Unpack[ConfigDict]) -> None:
        """Refuses optional fields, which would change versions that were written without them."""
        optional = [name for name, field in cls.model_fields.items() if not field.is_required()]
        if optional:
            raise TypeError(
                f"{cls.__name__}.{optional[0]} has a default, and every field of a document is "
                "written; mark a new field with Since and raise `newest`"
            )

    @classmethod
    def _late(cls, context: _Context | None) -> dict[str, Since | Renamed]:
        """Returns the fields that the file's version lacks or has under another name."""
        return _late_fields(cls, context["kind"], context["version"]) if context else {}

    @model_validator(mode="before")
    @classmethod
    def _read_older(cls, value: object, info: ValidationInfo[_Context | None]) -> object:
        late = cls._late(info.context)
        if not late or not isinstance(value, dict):
            return value
        fields = cast("dict[str, object]", value)
        if late.keys() & fields.keys():
            raise ValueError("a field of a later version")
        fields = dict(fields)
        for name, mark in late.items():
            if isinstance(mark, Since):
                fields[name] = mark.before
            elif mark.before in fields:
                fields[name] = fields.pop(mark.before)
        return fields

    @model_serializer(mode="wrap")
    def _write_older(
        self, handler: SerializerFunctionWrapHandler, info: SerializationInfo[_Context | None]
    ) -> dict[str, object]:
        fields = handler(self)
        late = self._late(info.context)
        for name, mark in late.items():
            value = fields.pop(name)
            if isinstance(mark, Renamed):
                fields[mark.before] = value
        return fields


class Document(Part):
    """A document of one kind."""

    kind: ClassVar[str]
    newest: ClassVar[int] = 1
    """Version that is written; all earlier versions can be read."""
    compact: ClassVar[bool] = False
    """Whether the document is written as one line of canonical JSON instead of indented."""
    role: ClassVar[str | None] = None
    """Role whose key signs the document; None: only one step writes and reads it, unsigned."""

    def content(self, version: int | None = None) -> JsonObject:
        """Returns the JSON object without its signature, which is the signed content."""
        number = version or self.newest
        fields = self.model_dump(mode="json", context={"kind": self.kind, "version": number})
        return {"schema": f"fedemb/{self.kind}/{number}", **fields}

    @classmethod
    def of_fields(cls, fields: Mapping[str, object]) -> Self:
        """Returns a document of the newest version from JSON fields.

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
    version: int
    signature: Mapping[str, str] | None
    data: bytes

    @functools.cached_property
    def sha(self) -> str:
        """Returns the SHA-256 of the bytes."""
        return sha256_hex(self.data)

    @functools.cached_property
    def content(self) -> JsonObject:
        """Returns the content that the signature covers."""
        return self.body.content(self.version)

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
    return Written(document, document.newest, signature, data)


def parse(data: bytes, expected: type[D], name: str, *, exact: bool = True) -> Written[D]:
    """Reads the bytes of a document; its signature is checked by a `TrustStore`.

    Args:
      data: the bytes, which must equal those that `written` returns for their content.
      expected: class of the document.
      name: name of the file, for the error message.
      exact: False skips the comparison of the bytes with those of `written`; the caller must check.

    Raises:
      LaterVersion: a later version of the package wrote the document.
      ArtifactError: the document has another kind, an unknown or missing field, or bytes
        that are not canonical (blanks, repeated keys, another spelling of a number).
    """
    what = f"the {expected.kind} document {name}"
    fields = json_object(data, what)
    schema = fields.pop("schema", None)
    found = _SCHEMA.fullmatch(schema) if isinstance(schema, str) else None
    wrong = (
        f"{what} has schema {str(schema)[:60]!r}, expected fedemb/{expected.kind}/1 to "
        f"{expected.newest}"
    )
    if found is None or found[1] != expected.kind:
        raise ArtifactError(
            f"{wrong}; run the step that writes it with this version of the package"
        )
    if int(found[2]) > expected.newest:
        raise LaterVersion(
            f"{wrong}; read it with the version of fedemb that wrote it or a later one, or run the "
            "step that writes it with this version of the package"
        )
    version = int(found[2])
    signature = _signature(fields.pop("signature", None), what)
    try:
        context = {"kind": expected.kind, "version": version}
        body = expected.model_validate(fields, context=context)
    except ValidationError as error:
        raise ArtifactError(
            f"{problem_of(error)} of {what} is unknown, missing or not of its form; run its step "
            "again with this version"
        ) from error
    result = Written(body, version, signature, data)
    if exact and not result.is_exact:
        raise ArtifactError(f"{what} was changed after it was written; run its step again")
    return result


def read(path: Path, expected: type[D]) -> Written[D]:
    """Reads a document's file; see `parse`."""
    try:
        data = path.read_bytes()
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
