"""Opens CSV files."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fedemb.data.formats.parts import Part, as_file, check_columns
from fedemb.errors import InputError
from fedemb.foundation.files import open_regular

if TYPE_CHECKING:
    from pyarrow import RecordBatch
    from pyarrow.csv import CSVStreamingReader, InvalidRow

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
        check_columns(part.said, _names_in_line_1(part, path), columns, header=False)
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
                f"Line 1 of {part.said}, which names the columns, is not UTF-8. Save the table as "
                f"UTF-8, for example by `iconv -f {code} -t utf-8`."
            ) from error


def bad_csv(part: Part, why: str) -> InputError:
    """Returns the error for a CSV file that pyarrow does not read."""
    if "straddling" in why or "Empty CSV file or block" in why:
        return InputError(
            f"{part.said} has a row of more than {LARGEST_ROW:,} bytes. Close the quote that is "
            "open there, or write a shorter row."
        )
    if "Empty CSV file" in why:
        return InputError(f"{part.said} is empty. Write a table with a header line.")
    return InputError(f"{part.said} cannot be read as CSV with a header line; check it")


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
