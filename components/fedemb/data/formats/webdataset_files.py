"""Reads webdataset shards: tar files whose neighbouring members with one key are one sample.

The key of `a/000123.left.jpg` is `a/000123`, and the ending of the member is `left.jpg`. A value of
a column `c` is the text of the member with the ending `c` or `c.txt`, or the field `c` of the
member `json`. Where the image may have any ending, a part that all endings of a sample share
belongs to the key: that of `a/p1.v2.jpg` and `a/p1.v2.json` is `a/p1.v2`.

Nothing is extracted, and no name is used as a path. Memory is bounded by the largest member that is
read. Unlike with `tarfile` alone, a file that ends early is refused and not read as a shorter one.
"""

from __future__ import annotations

import json
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Self

from typing_extensions import override

from fedemb.data.formats.bad_records import BadRecord
from fedemb.data.formats.image_files import KNOWN_ENDINGS, is_side_file
from fedemb.data.formats.parts import Part, as_file
from fedemb.data.identity import Cell, name_text
from fedemb.data.photos import MAX_BYTES
from fedemb.errors import InputError
from fedemb.foundation.canonical_json import Json, JsonObject
from fedemb.foundation.files import open_regular

KEY = "__key__"
"""Column with the key of a sample."""
ANY_IMAGE = "image"
"""Image column for which a member with any image ending is the image."""
LARGEST_HEADER = 1 << 20
"""Maximum bytes of an extended header, which holds a long name."""
_JSON = "json"
_CHUNK = 1 << 20
_EXTENDED = (b"x", b"g", b"X", b"L", b"K")


class _Header(tarfile.TarInfo):
    """Header of a member, of a bounded size."""

    @classmethod
    @override
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        found = super().frombuf(buf, encoding, errors)
        if found.size < 0 or (found.type in _EXTENDED and found.size > LARGEST_HEADER):
            raise ValueError
        return found


def _members(part: Part, needed: tuple[str, ...]) -> Iterator[tuple[tarfile.TarInfo, bytes | None]]:
    """Yields the members of a tar file except folders in order, with their content.

    Args:
      part: the file, plain or compressed with GZIP, bzip2 or xz.
      needed: endings of the files to read, at most `MAX_BYTES` each. The content of other members
        is None.

    Raises:
      InputError: the file is missing, cut or damaged, or is not one tar file.
      StorageError: no permission.
    """
    try:
        with (
            as_file(part) as path,
            open_regular(path) as file,
            tarfile.open(fileobj=file, tarinfo=_Header, encoding="utf-8") as tar,
        ):
            while found := tar.next():
                tar.members.clear()  # pyright: ignore[reportAttributeAccessIssue]
                if found.size < 0:  # by an extended header
                    raise ValueError
                read = found.name.lower().endswith(needed) and found.size <= MAX_BYTES
                content = tar.extractfile(found) if read and _is_plain(found) else None
                if not found.isdir():
                    yield found, content.read() if content else None
            _require_end(tar)
    except (FileNotFoundError, PermissionError):
        raise
    except (tarfile.TarError, OSError, EOFError, ValueError, OverflowError, zlib.error) as error:
        raise InputError(
            f"{part.said} is not one whole tar file (cut or damaged, or data after its end). "
            "Copy it again."
        ) from error


def _is_plain(found: tarfile.TarInfo) -> bool:
    sparse = found.issparse() or any(key.startswith("GNU.sparse") for key in found.pax_headers)
    return found.isfile() and not sparse


def _require_end(tar: tarfile.TarFile) -> None:
    """Raises ValueError unless an empty block and nothing else follows the last member.

    `tarfile` takes a damaged header for the end of the file.
    """
    file, empty = tar.fileobj, 0
    assert file is not None
    file.seek(tar.offset)
    while rest := file.read(_CHUNK):
        empty += len(rest)
        if rest.strip(b"\0"):
            raise ValueError
    if empty < tarfile.BLOCKSIZE:
        raise ValueError


@dataclass
class _Sample:
    """Members with one key."""

    key: str
    members: dict[str, bytes] = field(default_factory=dict)
    """Ending -> content of a member that is read."""
    bad: BadRecord | None = None
    """First reason why the sample is not used."""

    def reject(self, reason: str, read: str) -> None:
        """Marks the sample as bad, unless it is so already."""
        self.bad = self.bad or BadRecord.of(reason, read)

    def settle(self) -> None:
        """Moves the part that all endings share, as in `v2.jpg` and `v2.json`, to the key."""
        while len(self.members) > 1:
            parts = {ending: ending.partition(".") for ending in self.members}
            first, *others = {part[0] for part in parts.values()}
            if others or not all(part[2] for part in parts.values()):
                return
            self.key += f".{first}"
            self.members = {parts[ending][2]: data for ending, data in self.members.items()}


def iter_samples(
    part: Part, image: str, columns: Sequence[str]
) -> Iterator[tuple[bytes | BadRecord, dict[str, Cell]]]:
    """Yields image and values of each sample, and every file that is not part of a sample.

    Args:
      part: the shard.
      image: ending of the image member, or `ANY_IMAGE`.
      columns: names of the values to read.

    Raises:
      InputError: the shard is missing, cut or damaged.
      StorageError: no permission.
    """
    images = KNOWN_ENDINGS if image == ANY_IMAGE else (f".{image.lower()}",)
    texts = [f".{ending}" for name in columns for ending in _endings(name)]
    for sample in _samples(part, (*images, *texts, f".{_JSON}")):
        if isinstance(sample, BadRecord):
            yield sample, {name: None for name in columns}
            continue
        sample.settle()
        found = [data for name, data in sample.members.items() if f".{name}".endswith(images)]
        if image.lower() in sample.members:
            found = [sample.members[image.lower()]]
        if not sample.members:
            sample.bad = sample.bad or BadRecord("side_file")
        elif len(found) != 1:
            sample.reject("several_images" if found else "sample_without_image", sample.key)
        values = _values(sample, columns)
        yield sample.bad or found[0], values


def fields_of(part: Part, samples: int) -> tuple[list[str], list[str]]:
    """Returns the fields of the JSON members and the endings of the first samples, sorted.

    Raises:
      InputError: the shard is missing, cut or damaged.
    """
    fields, endings, keys = set[str](), set[str](), set[str]()
    for member, data in _members(part, (f".{_JSON}",)):
        key, ending = _split(member.name)
        if not member.isfile() or not key:
            continue
        keys.add(key)
        if len(keys) > samples:
            break
        endings.add(ending)
        fields |= set((_parsed(data) if data is not None else None) or {})
    return sorted(fields), sorted(endings)


def _samples(part: Part, needed: tuple[str, ...]) -> Iterator[_Sample | BadRecord]:
    sample: _Sample | None = None
    for member, data in _members(part, needed):
        name = member.name
        key, ending = _split(name)
        if not key:
            reason = "member_name" if _is_unsafe(name) else "member_not_a_file"
            plain = reason == "member_not_a_file" and _is_plain(member)
            yield BadRecord("side_file") if plain else BadRecord.of(reason, name)
            continue
        if sample is None or key != sample.key:
            if sample is not None:
                yield sample
            sample = _Sample(key)
        if not _is_plain(member):
            sample.reject("member_not_a_file", name)
        elif ending in sample.members:
            sample.reject("member_twice", name)
        elif data is not None:
            sample.members[ending] = data
        elif f".{ending}".endswith(needed):
            sample.reject("file_too_large", name)
    if sample is not None:
        yield sample


def _split(name: str) -> tuple[str, str]:
    """Returns key and ending of a member; empty if its name has none, or is unsafe or hidden.

    >>> _split("./a/000123.left.JPG"), _split("../000123.jpg"), _split("a/._000123.jpg")
    (('a/000123', 'left.jpg'), ('', ''), ('', ''))
    """
    folder, slash, last = name.removeprefix("./").rpartition("/")
    stem, _, ending = last.partition(".")
    if _is_unsafe(name) or not stem or not ending or is_side_file(folder + slash):
        return "", ""
    return folder + slash + stem, ending.lower()


def _is_unsafe(name: str) -> bool:
    """Returns whether a name is absolute, leads out of its folder, or is not UTF-8 or printable."""
    parts = name.removeprefix("./").split("/")
    return any(part in ("", ".", "..") or not part.isprintable() for part in parts)


def _endings(column: str) -> tuple[str, str]:
    """Returns the endings of members with the text of a column."""
    return column.lower(), f"{column.lower()}.txt"


def _values(sample: _Sample, columns: Sequence[str]) -> dict[str, Cell]:
    """Returns the values of a sample; a sample that contradicts itself is marked as bad."""
    tree = _parsed(sample.members.get(_JSON, b"{}"))
    if tree is None:
        sample.reject("json_not_valid", sample.key)
    values: dict[str, Cell] = {}
    for column in columns:
        texts = [ending for ending in _endings(column) if ending != _JSON]
        found: list[Cell] = [sample.members[one] for one in texts if one in sample.members]
        found += [tree[column]] if tree and column in tree else []
        if column == KEY:
            found = [sample.key]
        values[column] = found[0] if found else None
        if any(name_text(value) != name_text(found[0]) for value in found):
            sample.reject("values_differ", sample.key)
    return values


def _parsed(data: bytes) -> JsonObject | None:
    """Returns a JSON object; None if it is none, or has a field twice."""

    def once(pairs: list[tuple[str, Json]]) -> JsonObject:
        tree = dict(pairs)
        if len(tree) < len(pairs):
            raise ValueError
        return tree

    try:
        tree = json.loads(data, object_pairs_hook=once)
    except (ValueError, RecursionError):
        return None
    return tree if isinstance(tree, dict) else None
