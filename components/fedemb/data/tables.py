"""Tables of images: CSV, Parquet and TFRecord, read part by part."""

from __future__ import annotations

import codecs
import gzip
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, cast
from urllib.parse import unquote

from fedemb.errors import InputError, StorageError
from fedemb.foundation.files import open_regular
from fedemb.storage import open_store

if TYPE_CHECKING:
    from pyarrow import RecordBatch
    from pyarrow.csv import CSVStreamingReader, InvalidRow
    from pyarrow.parquet import ParquetFile

_HIVE_NULL = "__HIVE_DEFAULT_PARTITION__"


@dataclass(frozen=True)
class Part:
    """Piece of a source that one worker reads: a file, a row group, or some folders."""

    root: str
    """Address of the store."""
    name: str
    """Name of the file in the store; empty for folders."""
    title: str = "a file of the source"
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
    by_fold = {name.strip().casefold(): name for name in found}
    for column in wanted:
        if found.count(column) > 1:
            raise InputError(f"{said} has the column {column!r} more than once; rename the others")
        close = by_fold.get(column.strip().casefold())
        if column not in found and close is not None:
            raise InputError(
                f"{said} has no column {column!r}. It has {close!r}: rename the column, or set "
                "data.source.columns to that name."
            )
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
def as_file(part: Part) -> Iterator[Path]:
    """Yields the file of a part; a remote one is copied to the temporary folder, never to memory.

    Raises:
      InputError: the file is missing.
      StorageError: no permission.
    """
    try:
        with open_store(part.root).as_file(part.name) as path:
            yield path
    except FileNotFoundError as error:
        raise InputError(f"{part.title} is gone from {part.root}; check data.source.uri") from error
    except PermissionError as error:
        raise StorageError(
            f"{part.title} in {part.root} is not readable. Fix the permissions."
        ) from error


_UTF_16 = (b"\xff\xfe", b"\xfe\xff")
"""First bytes of a table that spreadsheets save as "Unicode text"."""

LARGEST_ROW = 16 << 20
"""Maximum bytes of one row of a CSV file."""

_LATIN_1 = "latin-1"
"""Encoding in which every byte is a character."""
_SCANNED = 1 << 20


@dataclass(frozen=True)
class Table:
    """Blocks of rows of an open CSV file."""

    reader: CSVStreamingReader
    """Reader of pyarrow."""
    latin_1: bool
    """Whether each byte is read as one Latin-1 character, because the file is not UTF-8. pyarrow
    cannot skip a row that is not UTF-8, and refuses the whole file instead."""

    @property
    def names(self) -> list[str]:
        """Column names in line 1; raises UnicodeDecodeError if they are not UTF-8."""
        names = self.reader.schema.names
        return [name.encode(_LATIN_1).decode() for name in names] if self.latin_1 else names

    def __iter__(self) -> Iterator[RecordBatch]:
        """Yields the record batches with the bytes of the file."""
        return map(self._as_in_file, self.reader) if self.latin_1 else iter(self.reader)

    def _as_in_file(self, block: RecordBatch) -> RecordBatch:
        import pyarrow as pa

        columns = [
            pa.array([None if text is None else text.decode().encode(_LATIN_1) for text in texts])
            for texts in block.to_pydict().values()
        ]
        return pa.record_batch(columns, self.names)


@contextmanager
def open_csv(
    part: Part, columns: Sequence[str], odd: Callable[[str], object] = lambda _: None
) -> Iterator[Table]:
    """Opens a CSV file for reading in blocks, all columns as bytes.

    Args:
      part: the file.
      columns: names of the columns to read.
      odd: called with the text of each row whose number of fields differs from the first line; the
        row is skipped.

    Raises:
      InputError: the file is missing or not a CSV, or a column is missing or duplicated.
      StorageError: no permission.
    """
    with as_file(part) as path:
        # The reader would take the first of two columns with one name.
        check_columns(part.title, _names_in_line_1(part, path), columns, header=False)
        with _csv_reader(part, path, odd, columns) as table:
            yield table


def csv_columns(part: Part) -> list[str]:
    """Returns the column names in the header line; raises as `open_csv`."""
    with as_file(part) as path:
        return _names_in_line_1(part, path)


def lines_in_quotes(part: Part) -> int:
    """Returns the number of lines of a CSV file that continue a value in quotes.

    A quote that is not closed takes in the rows below it without an error.
    """
    import pyarrow as pa

    odd: list[int] = []
    with as_file(part) as path:
        first = _names_in_line_1(part, path)[:1]
        with _csv_reader(part, path, lambda row: odd.append(lines_of(row)), first) as table:
            try:
                rows = sum(len(block) for block in table)
            except (OSError, pa.ArrowException) as error:
                raise bad_csv(part, str(error)) from error
        with open_regular(path) as file:
            lines = sum(not line.isspace() for line in file)
    return max(0, lines - len(first) - rows - sum(odd))


def lines_of(row: str) -> int:
    """Returns the number of lines of a row."""
    return row.strip("\r\n").count("\n") + 1


def _names_in_line_1(part: Part, path: Path) -> list[str]:
    with _csv_reader(part, path) as table:
        try:
            return table.names
        except UnicodeDecodeError as error:  # bytes are not shown: may be a row
            with open_regular(path) as file:
                code = "utf-16" if file.read(2) in _UTF_16 else "latin1"
            raise InputError(
                f"Line 1 of {part.title}, which names the columns, is not UTF-8. Save the table as "
                f"UTF-8, for example by `iconv -f {code} -t utf-8`."
            ) from error


def bad_csv(part: Part, why: str) -> InputError:
    """Returns the error for a CSV file that pyarrow does not read."""
    if "straddling" in why or "Empty CSV file or block" in why:
        return InputError(
            f"{part.title} has a row of more than {LARGEST_ROW:,} bytes. Close the quote that is "
            "open there, or write a shorter row."
        )
    if "Empty CSV file" in why:
        return InputError(f"{part.title} is empty. Write a table with a header line.")
    return InputError(f"{part.title} cannot be read as CSV with a header line; check it")


@contextmanager
def _csv_reader(
    part: Part,
    path: Path,
    odd: Callable[[str], object] = lambda _: None,
    columns: Sequence[str] = (),
) -> Iterator[Table]:
    """Opens a file; reads the given columns as bytes, or all columns as the reader guesses."""
    import pyarrow as pa
    from pyarrow import csv

    def left_out(row: InvalidRow) -> str:
        odd(row.text)
        return "skip"

    latin_1 = not _is_utf_8(path)
    as_read = [name.encode().decode(_LATIN_1) if latin_1 else name for name in columns]
    with open_regular(path) as file:
        if file.read(len(codecs.BOM_UTF8)) != codecs.BOM_UTF8:
            file.seek(0)
        try:
            reader = csv.open_csv(
                file,
                read_options=csv.ReadOptions(
                    # As UTF-8, a Latin-1 character has two bytes.
                    block_size=2 * LARGEST_ROW if latin_1 else LARGEST_ROW,
                    encoding=_LATIN_1 if latin_1 else "utf8",
                ),
                parse_options=csv.ParseOptions(
                    newlines_in_values=True, invalid_row_handler=left_out
                ),
                convert_options=csv.ConvertOptions(
                    check_utf8=False,
                    column_types=dict.fromkeys(as_read, pa.binary()),
                    include_columns=as_read,
                ),
            )
        except (OSError, pa.ArrowException) as error:
            raise bad_csv(part, str(error)) from error
        with reader:
            yield Table(reader, latin_1)


def _is_utf_8(path: Path) -> bool:
    decoder = codecs.getincrementaldecoder("utf-8")()
    with open_regular(path) as file:
        try:
            while block := file.read(_SCANNED):
                decoder.decode(block)
            decoder.decode(b"", final=True)
        except UnicodeDecodeError:
            return False
    return True


LARGEST_TEXT = 1 << 30
"""Maximum bytes of one text in the metadata of a file."""

MOST_ITEMS = 1 << 24
"""Maximum number of items, such as row groups, in one list of the metadata."""


@contextmanager
def open_parquet(part: Part) -> Iterator[ParquetFile]:
    """Opens a Parquet file; a remote one is copied to the temporary folder, never to memory.

    Raises:
      InputError: the file is missing, truncated or damaged.
      StorageError: no permission.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    with as_file(part) as path:
        try:
            file = pq.ParquetFile(
                path, thrift_string_size_limit=LARGEST_TEXT, thrift_container_size_limit=MOST_ITEMS
            )
        except (FileNotFoundError, PermissionError):
            raise
        except UnicodeDecodeError as error:  # of any column, also one that is not read
            raise InputError(
                f"{part.title} has a column whose name is not UTF-8 text. Rename the column, or "
                "copy the file again if it is damaged."
            ) from error
        except (OSError, pa.ArrowException) as error:
            raise InputError(f"{part.title} {_not_parquet(str(error))}") from error
        with file:
            yield file


def _not_parquet(why: str) -> str:
    """Returns the problem of a file that pyarrow does not open."""
    if "Exceeded size limit" in why:
        return (
            f"has metadata with a text of more than {LARGEST_TEXT:,} bytes or a list of more "
            f"than {MOST_ITEMS:,} items; write it in several files"
        )
    if "flatbuffers" in why:
        return "has columns nested deeper than pyarrow reads; write a file without these columns"
    return "is not a whole Parquet file (cut or damaged); copy it again"


LARGEST_RECORD = 1 << 30
"""Maximum bytes of one record."""


def _masked(data: bytes) -> int:
    """Returns the masked checksum of a TFRecord."""
    import google_crc32c

    crc = google_crc32c.value(data)
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


@contextmanager
def _unpacked(path: Path) -> Iterator[BinaryIO]:
    """Yields a TFRecord file decompressed, independent of its name."""
    with open_regular(path) as file:
        head = file.read(12)
        file.seek(0)
        # The length of a first record may start with the bytes of GZIP: its checksum decides.
        plain = len(head) == 12 and _masked(head[:8]) == int.from_bytes(head[8:], "little")
        if not plain and head[:2] == b"\x1f\x8b":
            yield cast("BinaryIO", gzip.GzipFile(fileobj=file))
        else:
            yield file


def iter_tfrecord(part: Part) -> Iterator[bytes]:
    """Yields the records of a TFRecord file with verified checksums; detects GZIP.

    Raises:
      InputError: the file is truncated or damaged.
    """
    with as_file(part) as path:
        try:
            with _unpacked(path) as file:
                while head := file.read(12):
                    length = int.from_bytes(head[:8], "little")
                    if len(head) < 12 or _masked(head[:8]) != int.from_bytes(head[8:], "little"):
                        raise EOFError
                    if length > LARGEST_RECORD:  # before allocating that memory
                        raise InputError(
                            f"{part.title} has a record of {length:,} bytes, more than "
                            f"{LARGEST_RECORD:,}; write smaller records"
                        )
                    record = file.read(length)
                    crc = file.read(4)
                    if len(record) < length or _masked(record) != int.from_bytes(crc, "little"):
                        raise EOFError
                    yield record
        except (FileNotFoundError, PermissionError):
            raise
        except (OSError, EOFError, zlib.error) as error:
            raise InputError(
                f"{part.title} is not a whole TFRecord file (cut, damaged or ZLIB); copy it again"
            ) from error
