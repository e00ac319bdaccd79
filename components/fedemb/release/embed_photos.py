"""Embeds a set of photos with a released model into one Parquet file.

Rows are in the order of the source: `name`, `embedding` (null if the file is not a readable photo)
and `reason` (null if it is). The embedding-space id is in the metadata of the file, because
embeddings of two releases must not be compared.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fedemb.data.photos import BadImageError, PhotoReader
from fedemb.errors import InputError
from fedemb.foundation.files import require_output
from fedemb.release.photo_source import Photo, PhotoSource
from fedemb.release.released import ReleasedModel
from fedemb.storage import open_store

if TYPE_CHECKING:
    import pyarrow as pa

    from fedemb.release.released import ReleasedModel

SPACE = b"embedding_space_id"
MOST_PHOTOS = 256
"""Photos of a batch."""
MOST_BYTES = 1 << 26
"""Bytes of the files of a batch, which bound the memory."""


class Pixels(NamedTuple):
    """A batch of decoded photos."""

    names: list[str]
    """Names as written; characters of a file name that are not Unicode become `?`."""
    images: np.ndarray
    """uint8 [readable photos, size, size, channels]."""
    reasons: list[str | None]
    """Error of each unreadable photo; None if readable."""


def decoded(photos: Iterable[Photo], reader: PhotoReader) -> Iterator[Pixels]:
    """Yields batches of decoded photos; for unreadable photos, the reason."""
    names, images, reasons, size = list[str](), list[np.ndarray](), list[str | None](), 0
    for name, data in photos:
        names.append(name.encode(errors="replace").decode())
        size += len(data) if isinstance(data, bytes) else 0
        try:
            if isinstance(data, BadImageError):
                raise data
            images.append(reader.read(data))
            reasons.append(None)
        except BadImageError as error:
            reasons.append(error.reason)
        if len(names) == MOST_PHOTOS or size >= MOST_BYTES:
            yield Pixels(names, _stacked(images, reader), reasons)
            names, images, reasons, size = [], [], [], 0
    if names:
        yield Pixels(names, _stacked(images, reader), reasons)


def _stacked(images: Sequence[np.ndarray], reader: PhotoReader) -> np.ndarray:
    none = np.zeros((0, reader.image_size, reader.image_size, reader.channels), np.uint8)
    return np.stack(images) if images else none


def schema(model: ReleasedModel) -> pa.Schema:
    """Returns the columns of the output; `probabilities` and `class` for a classifier."""
    import pyarrow as pa

    classes = model.config.model.classes
    columns = [
        ("name", pa.string()),
        ("probabilities" if classes else "embedding", pa.list_(pa.float32())),
        ("reason", pa.string()),
        *([("class", pa.string())] if classes else []),
    ]
    metadata = {b"classes": json.dumps(classes).encode()} if classes else {}
    return pa.schema(columns, {SPACE: model.space_id.encode(), **metadata})


def rows(model: ReleasedModel, pixels: Pixels, outputs: np.ndarray) -> pa.Table:
    """Returns the rows of a batch; `outputs` are those of its readable photos."""
    import pyarrow as pa

    found = iter(outputs)
    values = [None if reason else next(found) for reason in pixels.reasons]
    columns: list[Sequence[object]] = [pixels.names, values, pixels.reasons]
    if classes := model.config.model.classes:
        columns.append([None if row is None else classes[int(row.argmax())] for row in values])
    form = schema(model)
    return pa.table([pa.array(c, f.type) for c, f in zip(columns, form, strict=True)], form)


class Embedded(NamedTuple):
    """Counts of the files of a set by outcome."""

    photos: int
    """Number of rows written."""
    bad: int
    """Number of rows without an embedding; each such row has a reason."""
    side_files: int
    """Number of videos, sidecars and other files of a folder without a photo file name; no rows."""


def embed_photos(
    uri: str,
    model: ReleasedModel,
    output: str | Path,
    *,
    id_column: str | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> Embedded:
    """Embeds every photo of a folder or of Parquet; for classifiers, writes probabilities.

    Args:
      uri: folder, searched recursively, or Parquet file, folder of such files, or glob.
      model: the release; checked for parity first.
      output: the file to write, local or in a bucket; written last.
      id_column: column of row names; None uses file and row number.
      progress: called with the number of photos done.

    Returns: Counts of photos, of unreadable photos, and of files without a photo file name.

    Raises:
      InputError: the source has no readable photo, or the output exists.
      Refused: this installation decodes photos differently from training.
    """
    address = str(output)
    if "://" not in address:
        address = str(Path(address).expanduser().absolute())
    folder, _, file = address.rpartition("/")
    store = open_store(folder)
    if store.local_root is not None:
        require_output(store.local_root / file)
    if store.exists(file):
        raise InputError(f"{output} exists; name another file, or remove it")
    model.check_parity()
    source = PhotoSource(uri, id_column)
    with tempfile.TemporaryDirectory(prefix="fedemb-") as scratch:
        whole = Path(scratch, "embeddings.parquet")
        photos, bad = _write(source, model, whole, progress)
        if photos > bad:
            store.upload(whole, file)
    if not photos:
        raise InputError(f"No photos at {uri}. Pass a folder of photos or a Parquet file.")
    if photos == bad:
        raise InputError(
            f"None of the {photos:,} files at {uri} is a readable photo. Pass another folder."
        )
    return Embedded(photos, bad, source.side_files())


def _write(
    source: PhotoSource, model: ReleasedModel, path: Path, progress: Callable[[int], None]
) -> tuple[int, int]:
    """Writes the file; returns the numbers of rows and of rows without an embedding."""
    import pyarrow.parquet as pq

    photos = bad = 0
    with pq.ParquetWriter(path, schema(model)) as writer:
        for pixels in decoded(source.photos(), model.reader):
            writer.write_table(rows(model, pixels, model.embed(pixels.images)))
            photos += len(pixels.names)
            bad += len(pixels.names) - len(pixels.images)
            progress(photos)
    return photos, bad
