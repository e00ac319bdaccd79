"""Finds the folder of the images of a CSV file, which many exports keep next to the file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import PurePosixPath

from fedemb.data.formats.csv_files import open_csv
from fedemb.data.formats.image_files import ImageFiles
from fedemb.data.formats.parts import Part
from fedemb.data.photos import BadImageError
from fedemb.storage import open_store

_ROWS = 5
"""Number of names that are looked up."""
_FOLDERS = 100
"""Maximum number of folders that are tried."""
_USUAL = ("images", "train_images", "train", "photos", "img")
"""Folders that are tried in a bucket, whose folders are not listed."""


def image_root_of(part: Part, column: str) -> str:
    """Returns the folder of the CSV, or the folder next to it that has its first images.

    Args:
      part: the CSV file.
      column: name of the column with the names of the images.

    Raises:
      InputError: the file is damaged, or has no such column.
      StorageError: the folder cannot be read.
    """
    with open_csv(part, [column]) as table:
        first = next(iter(table), None)
        cells = first.slice(0, _ROWS).column(column).to_pylist() if first is not None else []
    names = [cell.decode(errors="ignore").strip() for cell in cells if cell]
    for root in _candidates(part):
        files = ImageFiles(root)
        for name in names:
            with suppress(BadImageError):
                files.read(name)
                return root
    return part.root


def _candidates(part: Part) -> Iterator[str]:
    yield part.root
    stem = PurePosixPath(part.name).stem
    local = open_store(part.root).local_root
    folders = [stem, f"{stem}_images", *_USUAL]
    if local is not None:
        with os.scandir(local) as entries:
            there = {e.name for e in entries if e.is_dir() and not e.name.startswith(".")}
        folders = [*(name for name in folders if name in there), *sorted(there)]
    for name in islice(dict.fromkeys(folders), _FOLDERS):
        yield f"{part.root.rstrip('/')}/{name}"
