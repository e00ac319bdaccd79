"""Photos to embed: a folder or Parquet files, read in a fixed order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from fedemb.config import SourceConfig
from fedemb.config.data import format_of
from fedemb.data.columns import format_of_files, guess_image_column, names_in_folder
from fedemb.data.identity import Cell
from fedemb.data.image_files import BadRecord, ImageFiles, is_side_file
from fedemb.data.photos import BadImageError
from fedemb.data.source_parts import find_files
from fedemb.data.sources import read_part
from fedemb.data.tables import Part
from fedemb.errors import InputError
from fedemb.foundation.addresses import split_address
from fedemb.storage import open_store

Photo = tuple[str, Cell]
"""Name, and bytes or the value found instead of bytes."""


@dataclass(frozen=True)
class PhotoSource:
    """A folder of photos, searched recursively, or Parquet files."""

    uri: str
    id_column: str | None = None
    """Parquet: column of row names; None uses file and row number."""

    @cached_property
    def kind(self) -> str:
        """Returns the format of the photos: a folder of files of one format has their format."""
        return format_of_files(self.uri) or format_of(self.uri)

    def photos(self) -> Iterator[Photo]:
        """Reads all photos, in the order of their names."""
        split_address(self.uri)
        if self.kind in ("csv", "tfrecord"):
            raise InputError(
                f"{self.uri} is a {self.kind} file, and `embed` reads a folder or Parquet. "
                "Pass the folder of the photos."
            )
        if self.kind == "image_folder":
            yield from self._files()
            return
        for file in find_files(self.uri, self.kind):
            yield from self._rows(file)

    def side_files(self) -> int:
        """Returns the number of files of a folder without a photo file name; they have no rows."""
        if self.kind != "image_folder":
            return 0
        return sum(map(is_side_file, open_store(self.uri).list()))

    def _files(self) -> Iterator[Photo]:
        files = ImageFiles(self.uri)
        for name in sorted(names_in_folder(self.uri)):
            if not is_side_file(name):
                try:
                    yield name, files.read(name)
                except BadImageError as error:
                    yield name, error

    def _rows(self, rows: Part) -> Iterator[Photo]:
        first = 0
        column = self.id_column
        source = SourceConfig.model_validate(
            {
                "uri": self.uri,
                "format": self.kind,
                "columns": {"image": guess_image_column(self.uri), "user_id": None, "label": None},
            }
        )
        for batch in read_part(source, rows, [column] if column else []):
            for number, photo in enumerate(batch.images, first):
                value = batch.columns[column][number - first] if column else None
                bad = isinstance(photo, BadRecord)
                unnamed = column is None or (bad and value is None)
                yield (
                    f"{rows.name}#{number}" if unnamed else str(value),
                    BadImageError(photo.reason) if bad else photo,
                )
            first += len(batch)
