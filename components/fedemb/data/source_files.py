"""Opens the files of a source, one at a time.

A file that is missing, truncated or not readable is an error, reported in one sentence. The caller
drops and counts bad records in a readable file.
"""

from __future__ import annotations

import errno
import gzip
import io
import os
import stat
import unicodedata
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import unquote

from fedemb.data.identity import SinglePrecision
from fedemb.data.photos import MAX_BYTES, BadImageError
from fedemb.data.records import example_class
from fedemb.errors import InputError, StorageError
from fedemb.foundation.files import open_regular, read_at_most
from fedemb.storage import nameable, open_store

KNOWN_ENDINGS = (
    *(".jpg", ".jpeg", ".png", ".webp", ".heic", ".gif"),
    *(".jfif", ".jpe", ".pjpeg", ".pjp", ".mpo", ".heif", ".hif", ".avif"),
)
"""Extensions that a table may omit from the name of an image file, common ones first."""
_ENDINGS = ("", *KNOWN_ENDINGS, *map(str.upper, KNOWN_ENDINGS))
_SIDE_FILES = (
    *(".3gp", ".avi", ".m4v", ".mkv", ".mov", ".mp", ".mp4", ".webm"),  # films, moving photos
    *(".aae", ".csv", ".html", ".json", ".jsonl", ".pdf", ".srt", ".txt", ".xml", ".xmp", ".zip"),
    *(".db", ".ini"),  # Thumbs.db, desktop.ini
)
"""Extensions of non-photo files that phones, exports and desktops put next to photos."""
_SIDE_FOLDERS = frozenset(
    (
        *("#recycle", "$recycle.bin", "@recycle", "lost+found"),
        *("@eadir", "#snapshot", "@recently-snapshot", "__macosx", "system volume information"),
    )
)
"""Folders that desktops and servers create, such as recycle bins and thumbnails; lower case."""
_HIVE_NULL = "__HIVE_DEFAULT_PARTITION__"
_LARGEST_RECORD = 1 << 30
"""Maximum bytes of one TFRecord."""


def is_side_file(name: str) -> bool:
    """Returns whether a file next to photos is not a photo, by its extension or folders.

    For all other files, the content decides.
    """
    lower = name.lower()
    return lower.endswith(_SIDE_FILES) or not _SIDE_FOLDERS.isdisjoint(lower.split("/")[:-1])


@dataclass(frozen=True)
class Part:
    """Piece of a source that one worker reads: a file, a row group, or some folders."""

    root: str
    """Address of the store."""
    name: str
    """Name of the file in the store; empty for folders."""
    said: str = "a file of the source"
    """Name of the file in errors, because the file name may contain a user ID
    (`user=ada/0.parquet`)."""
    row_group: int | None = None
    """Number of the row group; None: the whole file."""
    folders: tuple[str, ...] = ()
    """Names of the folders; empty for a file, and for all folders of the store."""


def check_columns(
    said: str, found: Sequence[str], wanted: Sequence[str], *, header: bool = True
) -> None:
    """Raises InputError unless a file has all columns, each once.

    Without `header`, the message does not list the columns found, because the first line of a CSV
    file may be personal data.
    """
    there = ", ".join(map(repr, sorted(found))) if header else f"{len(found)} others in line 1"
    for column in wanted:
        if found.count(column) > 1:
            raise InputError(f"{said} has the column {column!r} more than once; rename the others")
        if column not in found:
            raise InputError(
                f"{said} has no column {column!r}, it has {there}; name the right one in "
                "data.source.columns (or where, or partition.evaluation)"
            )


def path_values(name: str) -> dict[str, str | None]:
    """Returns the columns that Spark and Hive write as folders: `user_id=ada/part-0.parquet`."""
    pairs = (part.split("=", 1) for part in name.split("/")[:-1] if "=" in part)
    return {
        unquote(column): None if value == _HIVE_NULL else unquote(value) for column, value in pairs
    }


@contextmanager
def open_parquet(part: Part) -> Iterator[Any]:
    """Opens a Parquet file; a remote one is copied to the temporary folder, never to memory.

    Raises:
      InputError: the file is missing, truncated or damaged.
      StorageError: no permission.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    with _as_file(part) as path:
        try:
            file = pq.ParquetFile(path)
        except (FileNotFoundError, PermissionError):
            raise
        except (OSError, pa.ArrowException) as error:
            raise InputError(
                f"{part.said} is not a whole Parquet file (cut or damaged); copy it again"
            ) from error
        with file:
            yield file


@contextmanager
def _as_file(part: Part) -> Iterator[Path]:
    try:
        with open_store(part.root).as_file(part.name) as path:
            yield path
    except FileNotFoundError as error:
        raise InputError(f"{part.said} is gone from {part.root}; check data.source.uri") from error
    except PermissionError as error:
        raise StorageError(
            f"{part.said} in {part.root} is not readable. Fix the permissions."
        ) from error


@contextmanager
def open_csv(
    part: Part, columns: Sequence[str], odd: Callable[[], object] = lambda: None
) -> Iterator[Any]:
    """Opens a CSV file for reading in blocks, all columns as bytes.

    Args:
      part: the file.
      columns: names of the columns to read.
      odd: called for each line whose number of fields differs from the first line; it is skipped.

    Raises:
      InputError: the file is missing or not a CSV, or a column is missing or duplicated.
      StorageError: no permission.
    """
    import pyarrow as pa

    with _as_file(part) as path:
        # The reader would take the first of two columns with one name.
        check_columns(part.said, _names_in_line_1(part, path), columns, header=False)
        types = dict.fromkeys(columns, pa.binary())
        with _csv_reader(part, path, odd, column_types=types, include_columns=columns) as reader:
            yield reader


def csv_columns(part: Part) -> list[str]:
    """Returns the column names in the header line; raises as `open_csv`."""
    with _as_file(part) as path:
        return _names_in_line_1(part, path)


def _names_in_line_1(part: Part, path: Path) -> list[str]:
    with _csv_reader(part, path) as reader:
        try:
            return reader.schema.names
        except UnicodeDecodeError as error:  # bytes are not shown: may be a row
            raise InputError(
                f"the header line of {part.said} is not UTF-8; write one that names the columns"
            ) from error


def _csv_reader(
    part: Part, path: Path, odd: Callable[[], object] = lambda: None, **conversion: Any
) -> Any:
    import pyarrow as pa
    from pyarrow import csv

    def left_out(_row: Any) -> str:
        odd()
        return "skip"

    try:
        return csv.open_csv(
            path,
            read_options=csv.ReadOptions(block_size=1 << 24),
            parse_options=csv.ParseOptions(newlines_in_values=True, invalid_row_handler=left_out),
            convert_options=csv.ConvertOptions(check_utf8=False, **conversion),
        )
    except (FileNotFoundError, PermissionError):
        raise
    except (OSError, pa.ArrowException) as error:
        raise InputError(
            f"{part.said} cannot be read as CSV with a header line; check it"
        ) from error


def _masked(data: bytes) -> int:
    """Returns the masked checksum of a TFRecord."""
    import google_crc32c

    crc = google_crc32c.value(data)
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


class _Inflated(io.RawIOBase):
    """ZLIB stream that is read forwards."""

    def __init__(self, file: BinaryIO):
        self._file, self._inflate, self._left = file, zlib.decompressobj(), b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = b""
        while not data and not self._inflate.eof:
            packed = self._left or self._file.read(1 << 16)
            if not packed:
                raise EOFError
            data = self._inflate.decompress(packed, len(buffer))
            self._left = self._inflate.unconsumed_tail
        buffer[: len(data)] = data
        return len(data)


@contextmanager
def _unpacked(path: Path) -> Iterator[Any]:
    """Yields a TFRecord file decompressed, independent of its name."""
    with open_regular(path) as file:
        head = file.read(12)
        file.seek(0)
        # The length of a first record may start with the bytes of GZIP: its checksum decides.
        plain = len(head) == 12 and _masked(head[:8]) == int.from_bytes(head[8:], "little")
        if not plain and head[:2] == b"\x1f\x8b":
            yield gzip.GzipFile(fileobj=file)
        elif not plain and head[:1] == b"\x78" and int.from_bytes(head[:2], "big") % 31 == 0:
            yield io.BufferedReader(_Inflated(file))
        else:
            yield file


def iter_tfrecord(part: Part) -> Iterator[bytes]:
    """Yields the records of a TFRecord file with verified checksums; detects GZIP and ZLIB.

    Raises:
      InputError: the file is truncated or damaged.
    """
    with _as_file(part) as path:
        try:
            with _unpacked(path) as file:
                while head := file.read(12):
                    length = int.from_bytes(head[:8], "little")
                    if len(head) < 12 or _masked(head[:8]) != int.from_bytes(head[8:], "little"):
                        raise EOFError
                    if length > _LARGEST_RECORD:  # before allocating that memory
                        raise EOFError
                    record = file.read(length)
                    crc = file.read(4)
                    if len(record) < length or _masked(record) != int.from_bytes(crc, "little"):
                        raise EOFError
                    yield record
        except (FileNotFoundError, PermissionError):
            raise
        except (OSError, EOFError, zlib.error) as error:
            raise InputError(
                f"{part.said} is not a whole TFRecord file (cut or damaged); copy it again"
            ) from error


def example_values(record: bytes, names: Sequence[str]) -> dict[str, Any] | None:
    """Returns the first value of each named feature of a tf.train.Example; None if invalid."""
    try:
        features = example_class().FromString(record).features.feature
    except Exception:  # protobuf can raise anything at hostile bytes
        return None
    values: dict[str, Any] = {}
    for name in names:
        if name in features:
            kind = features[name].WhichOneof("kind")
            listed = list(getattr(features[name], kind).value[:1]) if kind else []
            first = listed[0] if listed else None
            values[name] = SinglePrecision(first) if isinstance(first, float) else first
    return values


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

    def read(self, name: str) -> bytes:
        """Returns the bytes of `name`, or of `name` with an image extension.

        Raises:
          BadImageError: the file is missing or larger than `MAX_BYTES`; in users' folders, also a
            video or another non-photo file, which is not opened.
          StorageError: the store cannot be read.
        """
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
