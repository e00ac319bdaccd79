"""Opens the files of a source, one by one.

A file that is missing, cut short or not readable is an error, said in one sentence. Bad records in
a readable file are left to the caller, who drops and counts them.
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
"""Endings that a table may leave out of the name of an image file, the usual ones first."""
_ENDINGS = ("", *KNOWN_ENDINGS, *map(str.upper, KNOWN_ENDINGS))
_SIDE_FILES = (
    *(".3gp", ".avi", ".m4v", ".mkv", ".mov", ".mp", ".mp4", ".webm"),  # films, moving photos
    *(".aae", ".csv", ".html", ".json", ".jsonl", ".pdf", ".srt", ".txt", ".xml", ".xmp", ".zip"),
    *(".db", ".ini"),  # Thumbs.db, desktop.ini
)
"""Endings of files that phones, exports and desktops put beside photos and that are no photos."""
_SIDE_FOLDERS = frozenset(
    (
        *("#recycle", "$recycle.bin", "@recycle", "lost+found"),
        *("@eadir", "#snapshot", "@recently-snapshot", "__macosx", "system volume information"),
    )
)
"""Recycle bins, stores of thumbnails and the like, which desktops and servers make; lower case."""
_HIVE_NULL = "__HIVE_DEFAULT_PARTITION__"
_LARGEST_RECORD = 1 << 30
"""Bytes of one TFRecord."""


def is_side_file(name: str) -> bool:
    """Whether a file beside photos is not a photo, by its ending or by one of its folders.

    Of any other file its content decides.
    """
    lower = name.lower()
    return lower.endswith(_SIDE_FILES) or not _SIDE_FOLDERS.isdisjoint(lower.split("/")[:-1])


@dataclass(frozen=True)
class Part:
    """A piece of a source that one worker reads: a file, a row group, or some folders."""

    root: str
    """Address of the store."""
    name: str
    """Name of the file in the store; empty for folders."""
    said: str = "a file of the source"
    """How an error names the file: its own name may hold a user's id (`user=ada/0.parquet`)."""
    row_group: int | None = None
    """None: all of the file."""
    folders: tuple[str, ...] = ()
    """Empty for a file, and for all folders of the store."""


def check_columns(
    said: str, found: Sequence[str], wanted: Sequence[str], *, header: bool = True
) -> None:
    """Raises InputError unless a file has all columns, each once.

    Without `header` it is not said what there is: the first line of a CSV file may be a person's.
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
    """Columns that Spark and Hive write as folders: `user_id=ada/part-0.parquet`."""
    pairs = (part.split("=", 1) for part in name.split("/")[:-1] if "=" in part)
    return {
        unquote(column): None if value == _HIVE_NULL else unquote(value) for column, value in pairs
    }


@contextmanager
def open_parquet(part: Part) -> Iterator[Any]:
    """Opens a Parquet file; a remote one is copied to the temporary folder, never to memory.

    Raises:
      InputError: missing, cut or damaged.
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
            f"{part.said} in {part.root} may not be read; fix permissions"
        ) from error


@contextmanager
def open_csv(
    part: Part, columns: Sequence[str], odd: Callable[[], object] = lambda: None
) -> Iterator[Any]:
    """Opens a CSV file for reading in blocks, all columns as bytes.

    Args:
      part: the file.
      columns: those wanted.
      odd: called for each line with another number of fields than the first, which is left out.

    Raises:
      InputError: missing, no CSV, or a column is not there or there twice.
      StorageError: no permission.
    """
    import pyarrow as pa

    with _as_file(part) as path:
        # Of two columns of one name the reader would take the first.
        check_columns(part.said, _names_in_line_1(part, path), columns, header=False)
        types = dict.fromkeys(columns, pa.binary())
        with _csv_reader(part, path, odd, column_types=types, include_columns=columns) as reader:
            yield reader


def csv_columns(part: Part) -> list[str]:
    """Names in the header line; raises as `open_csv`."""
    with _as_file(part) as path:
        return _names_in_line_1(part, path)


def _names_in_line_1(part: Part, path: Path) -> list[str]:
    with _csv_reader(part, path) as reader:
        try:
            return reader.schema.names
        except UnicodeDecodeError as error:  # which bytes they are is not said: it may be a row
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
    """Checksum of TFRecord."""
    import google_crc32c

    crc = google_crc32c.value(data)
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


class _Inflated(io.RawIOBase):
    """A ZLIB stream, read forwards."""

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
    """A TFRecord file without its compression, whatever its name says."""
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
    """Yields the records of a TFRecord file, checksums verified; GZIP and ZLIB by its first bytes.

    Raises:
      InputError: the file is cut or damaged.
    """
    with _as_file(part) as path:
        try:
            with _unpacked(path) as file:
                while head := file.read(12):
                    length = int.from_bytes(head[:8], "little")
                    if len(head) < 12 or _masked(head[:8]) != int.from_bytes(head[8:], "little"):
                        raise EOFError
                    if length > _LARGEST_RECORD:  # before as much memory is asked for
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
    """First value of each named feature of a tf.train.Example; None if the bytes are not one."""
    try:
        features = example_class().FromString(record).features.feature
    except Exception:  # whatever protobuf throws at hostile bytes: the record is dropped
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
    """Bytes of a regular file below a folder; None for a pipe, a device, or a link that leads out.

    With `own_folder`, also for a link out of the first folder of its name, which is a person's.

    Opened without waiting: a pipe that nobody writes to would hold a worker for ever.
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
    """A name in a table relative to the root, without `./`, doubled slashes, or the root itself."""
    for prefix in (f"{root}/", f"file://{root}/"):
        name = name.removeprefix(prefix)
    if name.startswith("/"):  # absolute, and not below the root
        return ""
    return "/".join(part for part in name.split("/") if part not in ("", "."))


class ImageFiles:
    """Reads image files by name below a root; what is not there is a bad record, not a failure.

    Args:
      uri: the root.
      of_users: folders directly below it are users; no link leads from one to another, which would
        make one person's photo two users' records.
    """

    def __init__(self, uri: str, *, of_users: bool = False):
        self._store, self._of_users = open_store(uri), of_users
        self.missing = ""
        """The first name for which there was no file. Private."""

    def read(self, name: str) -> bytes:
        """Returns the bytes of `name`, or of it with an ending for images.

        Raises:
          BadImageError: no such file, or larger than `MAX_BYTES`; of users' folders, also a film or
            another file beside photos, which is not opened.
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
        """Names below the root for a name in a table, the spelling of the table first.

        None leads out of the root, and none is hidden.
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
                f"an image file below {self._store.uri} may not be read; fix permissions"
            ) from error
        except OSError as error:
            if error.errno in (errno.ENAMETOOLONG, errno.ELOOP, errno.ENXIO):  # ENXIO: a socket
                return None
            raise StorageError(
                f"an image file below {self._store.uri} cannot be read: {error.strerror}"
            ) from error
