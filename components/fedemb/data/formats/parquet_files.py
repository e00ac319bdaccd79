"""Opens Parquet files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from fedemb.data.formats.parts import Part, as_file
from fedemb.errors import InputError

if TYPE_CHECKING:
    from pyarrow.parquet import ParquetFile

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
                path,
                thrift_string_size_limit=LARGEST_TEXT,
                thrift_container_size_limit=MOST_ITEMS,
            )
        except (FileNotFoundError, PermissionError):
            raise
        except UnicodeDecodeError as error:  # of any column, also one that is not read
            raise InputError(
                f"{part.said} has a column whose name is not UTF-8 text. Rename the column, or "
                "copy the file again if it is damaged."
            ) from error
        except (OSError, pa.ArrowException) as error:
            raise InputError(f"{part.said} {_not_parquet(str(error))}") from error
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
