"""Parts of a set of photos, and of the Parquet file of their embeddings.

Rows are `name`, `embedding` (null if the file is not a readable photo) and `reason` (null if it
is), in the order of the source. The embedding-space id is in the metadata of the file, because
embeddings of two releases must not be compared.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fedemb.config import SourceConfig
from fedemb.config.data import format_of
from fedemb.data.columns import format_of_files, guess_image_column
from fedemb.data.formats.bad_records import BadRecord
from fedemb.data.formats.exports import refuse_no_photos, refuse_other_format
from fedemb.data.formats.image_files import ImageFiles, is_side_file
from fedemb.data.formats.parquet_files import open_parquet
from fedemb.data.formats.parts import Part
from fedemb.data.formats.webdataset_files import ANY_IMAGE, KEY
from fedemb.data.identity import Cell
from fedemb.data.photos import BadImageError, PhotoReader
from fedemb.data.source_parts import find_files
from fedemb.data.sources import read_part
from fedemb.errors import InputError, Refused
from fedemb.foundation.addresses import split_address
from fedemb.storage import Store, open_store

if TYPE_CHECKING:
    pass

SPACE = b"embedding_space_id"
_CLASSES = b"classes"
_PHOTOS = b"photos_sha256"
"""Metadata key of a part: digest of names and bytes of its photos."""
_KEPT = re.compile(
    r"\.?([0-9]{6}-[0-9]{6}\.parquet|done\.json)(\.[0-9a-z_]{8})?|model-es-[0-9a-f]+(/.*|\.tree)"
)
"""Names of the files that `fedemb embed` stores next to its output, including unfinished files."""
PART = 2048
"""Maximum photos per part, and so the maximum work lost in a stop."""
PART_BYTES = 1 << 28
"""Maximum bytes of the files of a part, which bounds a worker's memory."""

Photo = tuple[str, Cell]
"""Name, and bytes or the value found instead of bytes."""


@dataclass(frozen=True)
class Unit:
    """Input of one worker task: some files of a folder, or a row group."""

    number: int
    files: tuple[str, ...] = ()
    """File names in a folder."""
    rows: Part | None = None
    """Parquet only: a row group, or a file of a bucket."""
    first: int = 0
    """Index of its first row in the file."""


@dataclass(frozen=True)
class PhotoSource:
    """A folder of photos, searched recursively, Parquet files or tar shards; in a fixed order."""

    uri: str
    id_column: str | None = None
    """Parquet only: column of row names; None uses file and row number."""

    def units(self) -> Iterator[Unit]:
        """Lists the units without reading them."""
        split_address(self.uri)
        kind = self.kind
        if kind in ("csv", "tfrecord"):
            raise InputError(
                f"{self.uri} is a {kind} file, and `embed` reads a folder, Parquet or tar shards. "
                "Pass the folder of the photos."
            )
        if kind == "image_folder":
            refuse_other_format(self.uri)
            files = open_store(self.uri).list()
            refuse_no_photos(self.uri, files)
            names = [name for name in files if not is_side_file(name)]
            yield from (Unit(i, tuple(part)) for i, part in enumerate(_batches(sorted(names))))
            return
        files = find_files(self.uri, kind)
        if kind == "webdataset":
            yield from (Unit(number, rows=file) for number, file in enumerate(files))
            return
        pieces = (piece for file in files for piece in _row_groups(file))
        for number, (rows, first) in enumerate(pieces):
            yield Unit(number, rows=rows, first=first)

    def side_files(self) -> int:
        """Returns the number of files of a folder without a photo file name; they have no rows."""
        if self.kind != "image_folder":
            return 0
        return sum(map(is_side_file, open_store(self.uri).list()))

    def parts(self, unit: Unit) -> Iterator[tuple[str, list[Photo]]]:
        """Reads a unit; each part has a unique name, in the order of the source."""
        photos = self._rows(unit.rows, unit.first) if unit.rows else self._files(unit.files)
        for number, part in enumerate(_parts(photos)):
            yield f"{unit.number:06d}-{number:06d}.parquet", part

    def _files(self, names: Iterable[str]) -> Iterator[Photo]:
        files = ImageFiles(self.uri)
        for name in names:
            try:
                yield name, files.read(name)
            except BadImageError as error:
                yield name, error

    @cached_property
    def kind(self) -> str:
        """Returns the format of the photos: a folder of files of one format has their format."""
        return format_of_files(self.uri) or format_of(self.uri)

    def _rows(self, rows: Part, first: int) -> Iterator[Photo]:
        shard = self.kind == "webdataset"
        column = self.id_column or (KEY if shard else None)
        image = ANY_IMAGE if shard else guess_image_column(self.uri)
        source = SourceConfig.model_validate(
            {
                "uri": self.uri,
                "format": self.kind,
                "columns": {"image": image, "user_id": None, "label": None},
            }
        )
        for batch in read_part(source, rows, [column] if column else []):
            for number, photo in enumerate(batch.images, first):
                value = batch.columns[column][number - first] if column else None
                missing = f"{rows.name}#{number}"
                name = f"{rows.name}/{value}" if column == KEY and value else value
                bad = isinstance(photo, BadRecord)
                yield (
                    missing if column is None or (bad and value is None) else str(name),
                    BadImageError(photo.reason) if bad else photo,
                )
            first += len(batch)


def _batches(names: Iterable[str]) -> Iterator[list[str]]:
    rest = iter(names)
    while batch := list(islice(rest, PART)):
        yield batch


def _parts(photos: Iterable[Photo]) -> Iterator[list[Photo]]:
    part: list[Photo] = []
    size = 0
    for photo in photos:
        part.append(photo)
        size += len(photo[1]) if isinstance(photo[1], bytes) else 0
        if len(part) == PART or size >= PART_BYTES:
            yield part
            part, size = [], 0
    if part:
        yield part


def _row_groups(part: Part) -> Iterator[tuple[Part, int]]:
    """Yields pieces of a Parquet file with the index of their first row."""
    if open_store(part.root).local_root is None:  # one download per file
        yield part, 0
        return
    first = 0
    with open_parquet(part) as file:
        for group in range(file.metadata.num_row_groups):
            yield replace(part, row_group=group), first
            first += file.metadata.row_group(group).num_rows


def _digest(photos: Sequence[Photo]) -> bytes:
    """Returns a digest of names and bytes; the photo under a name may have changed."""
    found = sha256()
    for name, data in photos:
        for item in (
            name.encode(errors="surrogateescape"),
            data if isinstance(data, bytes) else repr(data).encode(),
        ):
            found.update(len(item).to_bytes(8) + item)
    return found.hexdigest().encode()


@dataclass(frozen=True)
class Pixels:
    """A decoded part."""

    name: str
    photos_sha: bytes
    """See `_digest`."""
    names: list[str]
    """Names as written; characters of a file name that are not Unicode become `?`."""
    images: np.ndarray
    """uint8 [readable photos, size, size, channels]."""
    reasons: list[str | None]
    """Error of each unreadable photo; None if readable."""

    @classmethod
    def read(cls, name: str, photos: Sequence[Photo], reader: PhotoReader) -> Pixels:
        """Decodes photos; for unreadable photos, stores the reason."""
        images: list[np.ndarray] = []
        reasons: list[str | None] = []
        for _, data in photos:
            try:
                if isinstance(data, BadImageError):
                    raise data
                images.append(reader.read(data))
                reasons.append(None)
            except BadImageError as error:
                reasons.append(error.reason)
        none = np.zeros((0, reader.image_size, reader.image_size, reader.channels), np.uint8)
        stacked = np.stack(images) if images else none
        names = [named.encode(errors="replace").decode() for named, _ in photos]
        return cls(name, _digest(photos), names, stacked, reasons)


@dataclass(frozen=True)
class Done:
    """A stored part."""

    name: str
    photos: int
    bad: int


@dataclass(frozen=True)
class KeptParts:
    """The embedded parts of a set, stored next to the output."""

    uri: str
    space_id: str
    classes: tuple[str, ...] = ()
    """Classes of a classifier, in the order of its probabilities."""

    @property
    def column(self) -> str:
        """Name of the output column."""
        return "probabilities" if self.classes else "embedding"

    def find(self, name: str, photos: Sequence[Photo]) -> Done | None:
        """Returns a stored part, or None.

        Raises:
          Refused: the part belongs to another space, or to other photos.
        """
        import pyarrow.parquet as pq

        store = open_store(self.uri)
        if not store.exists(name):
            return None
        with store.as_file(name) as path:
            table = pq.read_table(path)
        stored = table.schema.metadata or {}
        space = stored.get(SPACE, b"none").decode()
        if space != self.space_id:
            raise Refused(
                f"{self.uri}/{name} has embeddings of the space {space}, but the model has the "
                f"space {self.space_id}; embed the photos again with this model"
            )
        if stored.get(_PHOTOS) != _digest(photos):
            raise Refused(
                f"{self.uri} was made of other photos than there are now; remove it, and embed "
                "all of them again"
            )
        return Done(name, len(table), table[self.column].null_count)

    def write(self, part: Pixels, embeddings: np.ndarray) -> Done:
        """Stores a part atomically."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        embedded = iter(embeddings)
        rows = [None if reason else next(embedded) for reason in part.reasons]
        columns = {
            "name": pa.array(part.names, pa.string()),
            self.column: pa.array(rows, pa.list_(pa.float32())),
            "reason": pa.array(part.reasons, pa.string()),
        }
        if self.classes:
            best = [None if row is None else self.classes[int(row.argmax())] for row in rows]
            columns["class"] = pa.array(best, pa.string())
        table = pa.table(columns).replace_schema_metadata(
            {**self._metadata(), _PHOTOS: part.photos_sha}
        )
        sink = pa.BufferOutputStream()
        pq.write_table(table, sink)
        open_store(self.uri).write(part.name, sink.getvalue().to_pybytes())
        return Done(part.name, len(rows), len(rows) - len(part.images))

    def join(self, parts: Iterable[Done], store: Store, output: str) -> None:
        """Writes the parts, in the order of the source, to one file."""
        import pyarrow.parquet as pq

        kept, whose = open_store(self.uri), self._metadata()
        with tempfile.TemporaryDirectory(prefix="fedemb-") as scratch:
            whole = Path(scratch, "embeddings.parquet")
            with ExitStack() as stack:
                writer = None
                for part in sorted(parts, key=lambda part: part.name):
                    with kept.as_file(part.name) as path:
                        table = pq.read_table(path).replace_schema_metadata(whose)
                    if writer is None:
                        writer = stack.enter_context(pq.ParquetWriter(whole, table.schema))
                    writer.write_table(table)
            store.upload(whole, output)

    def _metadata(self) -> dict[bytes, bytes]:
        classes = {_CLASSES: json.dumps(self.classes).encode()} if self.classes else {}
        return {SPACE: self.space_id.encode(), **classes}

    def remove(self) -> None:
        """Removes the files that `fedemb embed` stored; other files stay."""
        kept = open_store(self.uri)
        folder = kept.local_root
        if folder is None:
            for name in filter(_KEPT.fullmatch, kept.list()):
                kept.delete(name)
            return
        for path in [*folder.iterdir()]:
            if path.is_dir() and path.name.removeprefix(".").startswith("model-es-"):
                shutil.rmtree(path)  # created for Beam workers
            elif not path.is_dir() and _KEPT.fullmatch(path.name):
                path.unlink(missing_ok=True)
        with suppress(OSError):  # the folder contains other files
            folder.rmdir()
