"""Images in folders and tar files, and what is wrong with some of them.

The key of `a/000123.left.jpg` is `a/000123`, and the ending of the member is `left.jpg`. A value of
a column `c` is the text of the member with the ending `c` or `c.txt`, or the field `c` of the
member `json`. Where the image may have any ending, a part that all endings of a sample share
belongs to the key: that of `a/p1.v2.jpg` and `a/p1.v2.json` is `a/p1.v2`.

Nothing is extracted, and no name is used as a path. Memory is bounded by the largest member that is
read. Unlike with `tarfile` alone, a file that ends early is refused and not read as a shorter one.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import tarfile
import unicodedata
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from typing_extensions import override

from fedemb.data.identity import Cell, name_text
from fedemb.data.photos import MAX_BYTES, BadImageError
from fedemb.data.tables import Part, as_file
from fedemb.errors import InputError, StorageError
from fedemb.foundation.canonical_json import Json, JsonObject
from fedemb.foundation.files import open_regular, read_at_most
from fedemb.storage import nameable, open_store

_SHOWN = 120


@dataclass(frozen=True)
class BadRecord:
    """Takes the place of the image in a batch; it is counted, whatever its other columns are."""

    reason: str
    """Code of the reason, see `fedemb.partition.check.BAD`."""
    read: str = ""
    """Text that was read, for the data owner. Private."""

    @classmethod
    def of(cls, reason: str, read: str | bytes) -> BadRecord:
        """Returns a bad record with an excerpt of the text or bytes that were read."""
        return cls(reason, excerpt(read))


def excerpt(read: str | bytes) -> str:
    r"""Returns the start of a value as a Python literal; bytes also as Latin-1 text.

    >>> print(excerpt("Smith, jr,a.jpg"), excerpt(b"Zo\xeb"))
    'Smith, jr,a.jpg' b'Zo\xeb' (as Latin-1 'Zoë')
    """
    short = read[:_SHOWN]
    more = "..." if len(read) > _SHOWN else ""
    if isinstance(short, str):
        return repr(short) + more
    latin = short.decode("latin-1")
    return repr(short) + more + (f" (as Latin-1 {latin!r})" if latin.isprintable() else "")


KNOWN_ENDINGS = (
    *(".jpg", ".jpeg", ".png", ".webp", ".heic", ".gif"),
    *(".jfif", ".jpe", ".pjpeg", ".pjp", ".mpo", ".heif", ".hif", ".avif"),
)
"""Extensions that a table may omit from the name of an image file, common ones first."""

_ENDINGS = ("", *KNOWN_ENDINGS, *map(str.upper, KNOWN_ENDINGS))

_SIDE_FILES = (
    *(".3gp", ".avi", ".m4v", ".mkv", ".mov", ".mp", ".mp4", ".webm"),  # films, moving photos
    *(".aae", ".csv", ".html", ".json", ".jsonl", ".pdf", ".srt", ".txt", ".xml", ".xmp", ".zip"),
    *(".7z", ".gz", ".rar", ".tar", ".tgz"),
    *(".db", ".ini"),  # Thumbs.db, desktop.ini
    *(".idx", ".md", ".yaml", ".yml"),  # data sets
    *(".arw", ".cr2", ".cr3", ".dng", ".nef", ".orf", ".pef", ".raf", ".rw2"),  # raw photos
)
"""Extensions of non-photo files that phones, exports and desktops put next to photos."""

_SIDE_FOLDER = re.compile(
    r"(^|/)(#recycle|\$recycle\.bin|@recycle|lost\+found|@eadir|#snapshot|@recently-snapshot"
    r"|__macosx|system volume information"
    r"|files_trashbin|files_versions|appdata_[a-z0-9]+|__groupfolders"  # Nextcloud
    r"|[^/]+\.lrdata|[^/]+\.photoslibrary/(database|resources))/"
)
"""Folders that desktops, servers and catalogues create, such as recycle bins and thumbnails; lower
case."""


def is_side_file(name: str) -> bool:
    """Returns whether a file next to photos is not a photo, by its extension or folders.

    For all other files, the content decides.
    """
    lower = name.lower()
    return lower.endswith(_SIDE_FILES) or _SIDE_FOLDER.search(lower) is not None


def _read_inside(root: Path, name: str, *, own_folder: bool) -> bytes | None:
    """Returns the bytes of a regular file below a folder; None for other kinds of files.

    Other kinds are a pipe, a device, or a link that leads out of the folder. With `own_folder`,
    also a link that leads out of the first folder of its name, which belongs to one person.

    Opens the file without blocking, because a pipe without a writer would block a worker forever.
    """
    path = (root / name).resolve()
    inside = root / name.split("/", maxsplit=1)[0] if own_folder else root
    if not path.is_relative_to(inside.resolve()):
        return None
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return None
        return _whole(read_at_most(file, MAX_BYTES))


def _whole(data: bytes | None) -> bytes:
    if data is None:
        raise BadImageError("file_too_large")
    return data


def plain_name(name: str, root: str) -> str:
    """Returns a table's file name relative to the root, without `./`, `//` or the root itself."""
    for prefix in (f"{root}/", f"file://{root}/"):
        name = name.removeprefix(prefix)
    if name.startswith("/"):  # absolute, and not below the root
        return ""
    return "/".join(part for part in name.split("/") if part not in ("", "."))


class ImageFiles:
    """Reads image files by name below a root; a missing file is a bad record, not a failure.

    Args:
      uri: address of the root.
      of_users: whether folders directly below the root are users. Links between them are not
        followed, because one person's photo would become a record of two users.
    """

    def __init__(self, uri: str, *, of_users: bool = False):
        self._store, self._of_users = open_store(uri), of_users
        self.missing = ""
        """First name without a file. Private."""

    def read(self, name: Cell) -> bytes:
        """Returns the bytes of `name`, or of `name` with an image extension.

        Raises:
          BadImageError: the file is missing or larger than `MAX_BYTES`; in users' folders, also a
            video or another non-photo file, which is not opened.
          StorageError: the store cannot be read.
        """
        if isinstance(name, BadRecord):
            raise BadImageError(name.reason)
        if not isinstance(name, str):
            raise BadImageError("image_missing")
        if self._of_users and is_side_file(name):
            raise BadImageError("side_file")
        for candidate in self._spellings(name):
            for ending in _ENDINGS:
                data = self._try(candidate + ending)
                if data is not None:
                    return data
        if name and not self.missing:
            self.missing = name
        raise BadImageError("image_missing")

    def _spellings(self, name: str) -> Iterator[str]:
        """Yields names below the root for a name in a table, the table's spelling first.

        No name leads out of the root or is hidden.
        """
        known = set[str]()
        for path in (name, name.replace("\\", "/")):
            for form in (path, *(unicodedata.normalize(kind, path) for kind in ("NFC", "NFD"))):
                found = plain_name(form, self._store.uri)
                parts = found.split("/")
                if found in known or any(not part or part.startswith(".") for part in parts):
                    continue
                known.add(found)
                yield found
                if len(parts) == 1 and len(found) > 3:  # GLDv2 keeps abcdef.jpg in a/b/c/
                    yield f"{found[0]}/{found[1]}/{found[2]}/{found}"

    def _try(self, name: str) -> bytes | None:
        root = self._store.local_root
        try:
            if root is None:
                return _whole(self._store.read_up_to(name, MAX_BYTES)) if nameable(name) else None
            return _read_inside(root, name, own_folder=self._of_users)
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError, ValueError, RuntimeError):
            return None  # RuntimeError: a loop of links, until Python 3.13
        except PermissionError as error:
            raise StorageError(
                f"an image file below {self._store.uri} is not readable. Fix the permissions."
            ) from error
        except OSError as error:
            if error.errno in (errno.ENAMETOOLONG, errno.ELOOP, errno.ENXIO):  # ENXIO: a socket
                return None
            raise StorageError(
                f"An image file below {self._store.uri} is not readable: {error.strerror}. "
                "Check its permissions and run again."
            ) from error


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
