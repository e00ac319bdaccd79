"""Reads webdataset shards: tar files whose neighbouring members with one key are one sample.

The key of `a/000123.left.jpg` is `a/000123`, and the ending of the member is `left.jpg`. A value of
a column `c` is the text of the member with the ending `c` or `c.txt`, or the field `c` of the
member `json`. Where the image may have any ending, a part that all endings of a sample share
belongs to the key: that of `a/p1.v2.jpg` and `a/p1.v2.json` is `a/p1.v2`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from fedemb.data.formats.bad_records import BadRecord
from fedemb.data.formats.image_files import KNOWN_ENDINGS, is_side_file
from fedemb.data.formats.parts import Part
from fedemb.data.formats.tar_files import Member, iter_members
from fedemb.data.identity import Cell, name_text
from fedemb.data.photos import MAX_BYTES
from fedemb.foundation.canonical_json import Json, JsonObject

KEY = "__key__"
"""Column with the key of a sample."""
ANY_IMAGE = "image"
"""Image column for which a member with any image ending is the image."""
LARGEST_TEXT = 16 << 20
"""Maximum bytes of a member with text or JSON."""
_JSON = "json"


@dataclass
class Sample:
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
    for sample in _samples(part, image, columns):
        if isinstance(sample, BadRecord):
            yield sample, {name: None for name in columns}
            continue
        if image == ANY_IMAGE:
            sample.settle()
        found = _image(sample, image)
        values = _values(sample, columns)
        yield sample.bad or found, values


def fields_of(part: Part, samples: int) -> tuple[list[str], list[str]]:
    """Returns the fields of the JSON members and the endings of the first samples, sorted.

    Raises:
      InputError: the shard is missing, cut or damaged.
    """
    fields, endings = set[str](), set[str]()
    key, seen = "", 0
    for member in iter_members(
        part, lambda name, size: name.endswith(".json") and size < MAX_BYTES
    ):
        now, ending = _split(member.name or "")
        if member.kind != "file" or not now:
            continue
        seen, key = seen + (now != key), now
        if seen > samples:
            break
        endings.add(ending)
        tree = _parsed(member.data) if member.data is not None else None
        fields |= set(tree or {})
    return sorted(fields), sorted(endings)


def _samples(part: Part, image: str, columns: Sequence[str]) -> Iterator[Sample | BadRecord]:
    texts = {_JSON, *(ending for name in columns for ending in _endings(name))}
    dotted = tuple(f".{ending}" for ending in texts) if image == ANY_IMAGE else ()

    def is_text(ending: str) -> bool:
        return ending in texts or ending.endswith(dotted)

    def wanted(name: str, size: int) -> bool:
        ending = _split(name)[1]
        most = MAX_BYTES if _is_image(ending, image) else LARGEST_TEXT if is_text(ending) else -1
        return size <= most

    sample: Sample | None = None
    for member in iter_members(part, wanted):
        if member.kind == "folder":
            continue
        key, ending = _split(member.name or "")
        if not key:
            yield _alone(member)
            continue
        if sample is None or key != sample.key:
            if sample is not None:
                yield sample
            sample = Sample(key)
        name = member.name or ""
        needed = _is_image(ending, image) or is_text(ending)
        if member.kind != "file":
            sample.reject("member_not_a_file", name)
        elif ending in sample.members:
            sample.reject("member_twice", name)
        elif member.data is not None:
            sample.members[ending] = member.data
        elif needed:
            sample.reject("file_too_large", name)
    if sample is not None:
        yield sample


def _split(name: str) -> tuple[str, str]:
    """Returns key and ending of a member; empty if its name has none, or is absolute or hidden.

    >>> _split("./a/000123.left.JPG"), _split("../000123.jpg"), _split("a/._000123.jpg")
    (('a/000123', 'left.jpg'), ('', ''), ('', ''))
    """
    parts = name.removeprefix("./").split("/")
    stem, _, ending = parts[-1].partition(".")
    unsafe = any(part in ("", ".", "..") or not part.isprintable() for part in parts)
    if unsafe or not stem or not ending or is_side_file("/".join([*parts[:-1], ""])):
        return "", ""
    return "/".join([*parts[:-1], stem]), ending.lower()


def _alone(member: Member) -> BadRecord:
    """Returns the record of a member that belongs to no sample."""
    name = member.name
    if name is None:
        return BadRecord("member_name", "a name that is not UTF-8")
    parts = name.removeprefix("./").split("/")
    unsafe = any(part in ("", ".", "..") or not part.isprintable() for part in parts)
    if not unsafe and member.kind == "file":
        return BadRecord("side_file")
    return BadRecord.of("member_name" if unsafe else "member_not_a_file", name)


def _is_image(ending: str, image: str) -> bool:
    return f".{ending}".endswith(KNOWN_ENDINGS) if image == ANY_IMAGE else ending == image.lower()


def _image(sample: Sample, image: str) -> bytes | BadRecord:
    images = [data for ending, data in sample.members.items() if _is_image(ending, image)]
    if len(images) > 1:
        return BadRecord.of("several_images", sample.key)
    if not images:
        empty = not sample.members
        return BadRecord("side_file") if empty else BadRecord.of("sample_without_image", sample.key)
    return images[0]


def _endings(column: str) -> tuple[str, str]:
    """Returns the endings of members with the text of a column."""
    return column.lower(), f"{column.lower()}.txt"


def _values(sample: Sample, columns: Sequence[str]) -> dict[str, Cell]:
    """Returns the values of a sample; a sample that contradicts itself is marked as bad."""
    tree: JsonObject | None = {}
    if _JSON in sample.members:
        tree = _parsed(sample.members[_JSON])
        if tree is None:
            sample.reject("json_not_valid", sample.key)
    values: dict[str, Cell] = {}
    for column in columns:
        found: list[Cell] = [
            sample.members[ending]
            for ending in _endings(column)
            if ending in sample.members and ending != _JSON
        ]
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
