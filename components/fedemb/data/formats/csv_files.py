"""Opens CSV files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedemb.data.formats.parts import Part, as_file, check_columns
from fedemb.errors import InputError
from fedemb.foundation.files import open_regular

_UTF_16 = (b"\xff\xfe", b"\xfe\xff")
"""First bytes of a table that spreadsheets save as "Unicode text"."""

LARGEST_ROW = 16 << 20
"""Maximum bytes of one row of a CSV file."""


@contextmanager
def open_csv(
    part: Part, columns: Sequence[str], odd: Callable[[str], object] = lambda _: None
) -> Iterator[Any]:
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
    import pyarrow as pa

    with as_file(part) as path:
        # The reader would take the first of two columns with one name.
        check_columns(part.said, _names_in_line_1(part, path), columns, header=False)
        types = dict.fromkeys(columns, pa.binary())
        with _csv_reader(part, path, odd, column_types=types, include_columns=columns) as reader:
            yield reader


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
        with _csv_reader(part, path, lambda row: odd.append(lines_of(row))) as reader:
            try:
                rows = sum(len(block) for block in reader)
            except (OSError, pa.ArrowException) as error:
                raise bad_csv(part, str(error)) from error
        with open_regular(path) as file:
            lines = sum(not line.isspace() for line in file)
    return max(0, lines - len(first) - rows - sum(odd))


def lines_of(row: str) -> int:
    """Returns the number of lines of a row."""
    return row.strip("\r\n").count("\n") + 1


def _names_in_line_1(part: Part, path: Path) -> list[str]:
    with _csv_reader(part, path) as reader:
        try:
            return reader.schema.names
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


def _csv_reader(
    part: Part, path: Path, odd: Callable[[str], object] = lambda _: None, **conversion: Any
) -> Any:
    import pyarrow as pa
    from pyarrow import csv

    def left_out(row: Any) -> str:
        odd(row.text)
        return "skip"

    try:
        return csv.open_csv(
            path,
            read_options=csv.ReadOptions(block_size=LARGEST_ROW),
            parse_options=csv.ParseOptions(newlines_in_values=True, invalid_row_handler=left_out),
            convert_options=csv.ConvertOptions(check_utf8=False, **conversion),
        )
    except (FileNotFoundError, PermissionError):
        raise
    except (OSError, pa.ArrowException) as error:
        raise bad_csv(part, str(error)) from error
