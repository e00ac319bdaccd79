"""Reads images with owners: Parquet, TFRecord, folders, CSV; local, gs://, s3://.

Reading has three stages, so that Beam can distribute it and a laptop can loop over it. `find_parts`
checks names and schemas, and raises an error for infrastructure faults. `split_part` splits a file
or folder into parts for workers. `read_part` yields batches of rows without validating records; the
caller drops bad records.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from fedemb.config import SourceConfig
from fedemb.data.identity import Cell, SinglePrecision, name_text
from fedemb.data.image_files import BadRecord, ImageFiles, plain_name
from fedemb.data.photos import BadImageError, PhotoReader
from fedemb.data.records import example_values
from fedemb.data.source_parts import check_parquet, csv_image_root, find_parts, split_part
from fedemb.data.tables import (
    Part,
    bad_csv,
    iter_tfrecord,
    lines_of,
    open_csv,
    open_parquet,
    path_values,
)
from fedemb.errors import InputError
from fedemb.storage import open_store

if TYPE_CHECKING:
    from pyarrow import Array, Scalar

BATCH_ROWS = 256
BATCH_BYTES = 8 << 20
_NOT_HELD = (ValueError, OverflowError, LookupError, NotImplementedError)
"""Errors of pyarrow for values that Python cannot hold, such as times in an unknown time zone."""


@dataclass
class Batch:
    """Rows as columns of equal length, with the values of the source."""

    images: Sequence[Cell]
    """Encoded bytes, or the name (str) of an image file for `ImageFiles`, or a `BadRecord`."""
    columns: Mapping[str, Sequence[Cell]] = field(default_factory=dict)
    """Column name in the source -> values, for all other columns."""

    def __len__(self) -> int:
        """Returns the number of rows."""
        return len(self.images)


def read_part(source: SourceConfig, part: Part, columns: Sequence[str]) -> Iterator[Batch]:
    """Yields the rows of a part that pass `where`, in batches that fit in memory.

    Raises:
      InputError: the file is damaged.
      StorageError: the file can no longer be read.
    """
    wanted = list(dict.fromkeys([*columns, *source.where]))
    kind = source.file_format
    readers = {
        "parquet": _read_parquet,
        "csv": _read_csv,
        "tfrecord": _read_tfrecord,
        "image_folder": _read_folders,
    }
    for batch in readers[kind](source, part, wanted):
        kept = apply_where(source, named_labels(source, batch))
        if len(kept):
            yield kept


def named_labels(source: SourceConfig, batch: Batch) -> Batch:
    """Returns the rows with class numbers replaced by the names in `label_names`."""
    names, column = source.label_names, source.columns.label
    if not names or column is None or column not in batch.columns:
        return batch
    known = {str(number): name for number, name in enumerate(names)}
    labels = [known.get(name_text(value) or "") for value in batch.columns[column]]
    return Batch(batch.images, {**batch.columns, column: labels})


def apply_where(source: SourceConfig, batch: Batch) -> Batch:
    """Returns the rows that match the filter `where`, and all bad records."""
    keep = np.ones(len(batch), bool)
    for column, values in source.where.items():
        allowed = {name_text(value) for value in values}
        keep &= [name_text(value) in allowed for value in batch.columns[column]]
    keep |= [isinstance(image, BadRecord) for image in batch.images]
    if keep.all():
        return batch
    rows = np.flatnonzero(keep).tolist()
    return Batch(
        [batch.images[row] for row in rows],
        {name: [values[row] for row in rows] for name, values in batch.columns.items()},
    )


def passing(source: SourceConfig) -> dict[str, Cell]:
    """Returns values that pass `where`, for a record that is counted as bad without values."""
    return {name: values[0] for name, values in source.where.items() if values}


def _read_parquet(source: SourceConfig, part: Part, columns: list[str]) -> Iterator[Batch]:
    import pyarrow as pa

    image = source.columns.image
    with open_parquet(part) as file:
        check_parquet(part, file.schema_arrow, source, columns)
        named = file.schema_arrow.names
        of_path = {k: v for k, v in path_values(part.name).items() if k not in named}
        read = list({image, *columns} - of_path.keys())
        groups = range(file.metadata.num_row_groups) if part.row_group is None else [part.row_group]
        for group in groups:
            about = file.metadata.row_group(group)
            each = max(1, about.total_byte_size // max(1, about.num_rows))
            rows = int(min(BATCH_ROWS, max(4, BATCH_BYTES // each)))
            try:
                for batch in file.iter_batches(rows, [group], read):
                    images = batch.column(image)
                    if pa.types.is_struct(images.type):
                        images = images.field("bytes")
                    others = {
                        name: [of_path[name]] * len(images)
                        if name in of_path
                        else _values(batch.column(name))
                        for name in columns
                    }
                    yield Batch(images.to_pylist(), others)
            except (OSError, pa.ArrowException) as error:
                raise InputError(f"{part.title} is damaged in the middle; copy it again") from error


def _values(column: Array) -> list[Cell]:
    """Returns a column's values; None for values that Python cannot hold, e.g. invalid UTF-8."""
    import pyarrow as pa

    try:
        values = column.to_pylist()
    except _NOT_HELD:
        return [_value(item) for item in column]
    if pa.types.is_float32(column.type) or pa.types.is_float16(column.type):
        return [None if value is None else SinglePrecision(value) for value in values]
    return values


def _value(item: Scalar) -> Cell:
    try:
        return item.as_py()
    except _NOT_HELD:
        return None


def _read_csv(source: SourceConfig, part: Part, columns: list[str]) -> Iterator[Batch]:
    import pyarrow as pa

    image_id = source.columns.image_id
    names = list(dict.fromkeys([image_id, *columns]))
    odd, root = list[BadRecord](), open_store(csv_image_root(source)).uri
    below = "" if source.image_root else part.name.rpartition("/")[0]

    def leave_out(row: str) -> None:
        odd.extend([BadRecord.of("line_not_a_row", row)] * lines_of(row))

    with open_csv(part, names, leave_out) as reader:
        try:
            for block in reader:
                for start in range(0, len(block), BATCH_ROWS):
                    rows = block.slice(start, BATCH_ROWS)
                    read = {name: rows.column(name).to_pylist() for name in names}
                    images = [
                        _csv_image(row, root, below, odd)
                        for row in zip(*read.values(), strict=True)
                    ]
                    yield Batch(images, {name: read[name] for name in columns})
        except (OSError, pa.ArrowException) as error:
            raise bad_csv(part, str(error)) from error
    for start in range(0, len(odd), BATCH_ROWS):
        lines = odd[start : start + BATCH_ROWS]
        yield Batch(lines, {name: [None] * len(lines) for name in columns})


def _csv_image(
    row: tuple[bytes | None, ...], root: str, below: str, odd: list[BadRecord]
) -> str | BadRecord:
    """Returns the normalised name of a row's image file below the root.

    Args:
      row: the name, and the other values that are read.
      root: address of the image files.
      below: folder below the root to which the name is relative, unless it has the root itself.
      odd: the lines after the first of a row over several lines are added: no name, id or class
        has a line break, so a quote is not closed.
    """
    for value in row:
        if value is not None and b"\n" in value.strip():
            bad = BadRecord.of("line_not_a_row", value)
            odd.extend([bad] * value.strip().count(b"\n"))
            return bad
    try:
        name = (row[0] or b"").decode().strip()
    except UnicodeDecodeError:
        return BadRecord.of("image_name_not_text", row[0] or b"")
    plain = plain_name(name, root) or name
    whole = not name or plain.startswith("/") or name.startswith((f"{root}/", f"file://{root}/"))
    return plain if whole or not below else f"{below}/{plain}"


def _read_folders(source: SourceConfig, part: Part, columns: list[str]) -> Iterator[Batch]:
    store = open_store(part.root)
    for folder in part.folders:
        names = store.list(f"{folder}/")
        for start in range(0, len(names), BATCH_ROWS):
            images = names[start : start + BATCH_ROWS]
            classes = ["/".join(name.split("/")[1:-1]) or folder for name in images]
            everything: dict[str, list[str]] = {}
            if source.columns.user_id:
                everything[source.columns.user_id] = [_unicode(folder)] * len(images)
            if source.columns.label:
                everything[source.columns.label] = [_unicode(name) for name in classes]
            readable = [name if name == _unicode(name) else "" for name in images]
            yield Batch(readable, {name: everything[name] for name in columns})


def _unicode(name: str) -> str:
    """Returns a file name without non-Unicode bytes, which Beam cannot pass between workers."""
    return name.encode(errors="ignore").decode()


def _read_tfrecord(source: SourceConfig, part: Part, columns: list[str]) -> Iterator[Batch]:
    image = source.columns.image
    rows: list[dict[str, Cell]] = []
    for record in iter_tfrecord(part):
        rows.append(example_values(record, [image, *columns]) or passing(source))
        if len(rows) == BATCH_ROWS:
            yield _from_rows(rows, image, columns)
            rows = []
    if rows:
        yield _from_rows(rows, image, columns)


def _from_rows(rows: Sequence[Mapping[str, Cell]], image: str, columns: list[str]) -> Batch:
    others = {name: [row.get(name) for row in rows] for name in columns}
    return Batch([row.get(image) for row in rows], others)


def image_files(source: SourceConfig) -> ImageFiles | None:
    """Returns the reader of a source's image files; None if its files contain the images."""
    kind = source.file_format
    if kind == "csv":
        return ImageFiles(csv_image_root(source))
    return ImageFiles(source.uri, of_users=True) if kind == "image_folder" else None


def read_public_images(
    source: SourceConfig, reader: PhotoReader, most: int | None = None, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Reads a public set, or a random part of it; images that do not decode are skipped.

    Only the encoded images of the part are in memory, so the set may be large.

    Args:
      source: source of the images; without a label column every user is one class.
      reader: photo reader of the model.
      most: maximum number of images; None: all.
      seed: seed of the choice; the same source and seed give the same images.

    Returns:
      images: uint8 `[images, image_size, image_size, channels]`.
      classes: str `[images]`; empty for an image without a class.

    Raises:
      InputError: no files found, a column is missing, a file is damaged, or no image decodes.
      StorageError: the source cannot be read.
    """
    random = np.random.default_rng(seed)
    kept: list[tuple[Cell, Cell]] = []
    for number, row in enumerate(_rows(source, source.columns.label or source.columns.user_id)):
        if most is None or number < most:
            kept.append(row)
        elif (place := int(random.integers(number + 1))) < most:
            kept[place] = row
    images = np.empty((len(kept), reader.image_size, reader.image_size, reader.channels), np.uint8)
    classes: list[str] = []
    for pixels, name in _decoded(source, reader, iter(kept)):
        images[len(classes)] = pixels
        classes.append(name)
    if not classes:
        raise InputError(f"no image of {source.uri} decodes; check the public source")
    return images[: len(classes)], np.array(classes)


def _rows(source: SourceConfig, column: str | None) -> Iterator[tuple[Cell, Cell]]:
    """Yields all images of a public source in a fixed order, each with the value of its column."""
    columns = [column] if column else []
    parts = [piece for part in find_parts(source, columns) for piece in split_part(part)]
    folders = sorted(folder for part in parts for folder in part.folders)
    if folders:  # found in any order, but the public set has one
        parts = [replace(parts[0], folders=tuple(folders))]
    for part in parts:
        for batch in read_part(source, part, columns):
            nothing = itertools.repeat(None, len(batch.images))
            yield from zip(batch.images, batch.columns[column] if column else nothing, strict=True)


def _decoded(
    source: SourceConfig, reader: PhotoReader, rows: Iterator[tuple[Cell, Cell]]
) -> Iterator[tuple[np.ndarray, str]]:
    """Yields pixels and class names of the images that decode; empty: no class."""
    files = image_files(source)

    def decode(row: tuple[Cell, Cell]) -> tuple[np.ndarray, str] | None:
        try:
            data = files.read(row[0]) if files else row[0]
            return reader.read(data), name_text(row[1]) or ""
        except BadImageError:
            return None

    with ThreadPoolExecutor(4) as pool:
        while some := list(itertools.islice(rows, BATCH_ROWS)):
            yield from filter(None, pool.map(decode, some))
