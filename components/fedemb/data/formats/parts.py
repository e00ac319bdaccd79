"""Pieces of a source, and columns that a file must have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from fedemb.errors import InputError, StorageError
from fedemb.storage import open_store

_HIVE_NULL = "__HIVE_DEFAULT_PARTITION__"


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
        raise InputError(f"{part.said} is gone from {part.root}; check data.source.uri") from error
    except PermissionError as error:
        raise StorageError(
            f"{part.said} in {part.root} is not readable. Fix the permissions."
        ) from error
