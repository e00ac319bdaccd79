"""Batches of decoded photos, and the rows of their embeddings.

Rows are `name`, `embedding` (null if the file is not a readable photo) and `reason` (null if it
is). The embedding-space id is in the metadata of the file, because embeddings of two releases must
not be compared.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fedemb.data.photos import BadImageError, PhotoReader
from fedemb.serving.photo_source import Photo

if TYPE_CHECKING:
    import pyarrow as pa

    from fedemb.serving.released import ReleasedModel

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
