"""Embeds a set of photos by a released model into one Parquet file, in parts that survive a stop.

Rows are `name`, `embedding` (null for what is no photo) and `reason` (null for what is one), in the
order of the source. The embedding-space id stands in the metadata of the file: embeddings of two
releases must not be compared.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from fedemb.config import SourceConfig
from fedemb.data.columns import guess_image_column
from fedemb.data.photos import BadImageError
from fedemb.data.source_files import KNOWN_ENDINGS, ImageFiles
from fedemb.data.source_parts import find_files, source_format
from fedemb.data.sources import Part, read_part
from fedemb.embedding.released import ReleasedModel
from fedemb.errors import InputError, Refused
from fedemb.storage import open_store

SPACE = b"embedding_space_id"
_PHOTOS = b"photos_sha256"
"""Of a part: names and bytes of its photos."""
PART = 2048
"""Photos of one part: what a stop may cost."""

Photo = tuple[str, Any]
"""Name, and the bytes, or what stood in their place."""


def embed_photos(
    uri: str,
    model: ReleasedModel,
    output: Path,
    *,
    id_column: str | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> tuple[int, int]:
    """Embeds every photo of a folder or of Parquet files.

    What was embedded before a stop is kept beside the output and not embedded again.

    Args:
      uri: folder, searched to its depths, or Parquet file, folder of them or glob.
      model: checked for parity first.
      output: the file to write; written last of all.
      id_column: Parquet only: names the rows; None: file and row number.
      progress: told how many photos are done.

    Returns:
      Photos, and how many of them could not be read.

    Raises:
      InputError: nothing there, or the output exists.
      Refused: this installation reads photos otherwise than training did, or what was kept is of
        another model.
    """
    if output.exists():
        raise InputError(f"{output} exists; name another file, or remove it")
    model.check_parity()
    kept = output.with_name(f"{output.name}.parts")
    kept.mkdir(parents=True, exist_ok=True)
    photos = list_photos(uri, id_column)
    number = done = bad = 0
    while part := list(islice(photos, PART)):
        path = kept / f"{number:06d}.parquet"
        bad += _part(path, part, model)
        number, done = number + 1, done + len(part)
        progress(done)
    if not number:
        raise InputError(f"there is no photo at {uri}; check the address")
    _join([kept / f"{index:06d}.parquet" for index in range(number)], output)
    shutil.rmtree(kept)
    return done, bad


def list_photos(uri: str, id_column: str | None = None) -> Iterator[Photo]:
    """Yields the photos of a folder or of Parquet files, always in the same order."""
    kind = source_format(SourceConfig(uri=uri))
    if kind != "parquet":
        files = ImageFiles(uri)
        for name in sorted(open_store(uri).list()):
            if name.lower().endswith(KNOWN_ENDINGS):
                yield name, _bytes_of(files, name)
        return
    store, names = find_files(uri, kind)
    tree = {"uri": uri, "columns": {"image": guess_image_column(uri), "user_id": None}}
    source = SourceConfig.model_validate(tree)
    for name in names:
        row = 0
        for batch in read_part(source, Part(store.uri, name), [id_column] if id_column else []):
            ids = batch.columns[id_column] if id_column else range(row, row + len(batch))
            for identity, image in zip(ids, batch.images, strict=True):
                yield (str(identity) if id_column else f"{name}#{identity}"), image
            row += len(batch)


def read_embeddings(path: Path, space_id: str) -> tuple[list[str], np.ndarray]:
    """Reads the embeddings of one space.

    Returns:
      Names, and float32 [photos, dim]; rows without an embedding are left out.

    Raises:
      InputError: no such file.
      Refused: they are of another space.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path)
    except (OSError, pa.ArrowException) as error:
        raise InputError(f"{path} holds no embeddings; write it with `fedemb embed`") from error
    _require_space(table.schema, space_id, path)
    table = table.filter(table["embedding"].is_valid())
    values = table["embedding"].combine_chunks().flatten().to_numpy(zero_copy_only=False)
    return table["name"].to_pylist(), values.reshape(len(table), -1).astype(np.float32)


def _part(path: Path, photos: list[Photo], model: ReleasedModel) -> int:
    """Embeds a part unless it is there, and returns how many photos could not be read."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    made_of = _digest(photos)
    if path.exists():
        table = pq.read_table(path)
        _require_space(table.schema, model.space_id, path)
        if (table.schema.metadata or {}).get(_PHOTOS) != made_of:
            raise Refused(
                f"{path.parent} was made of other photos than there are now; remove it, and embed "
                "all of them again"
            )
        return table["embedding"].null_count
    pixels: list[np.ndarray] = []
    reasons: list[str | None] = []
    for _, data in photos:
        try:
            pixels.append(model.reader.read(data))
            reasons.append(None)
        except BadImageError as error:
            reasons.append(error.reason)
    embedded = iter(model.embed(np.stack(pixels)) if pixels else ())
    rows = [None if reason else next(embedded) for reason in reasons]
    table = pa.table(
        {
            "name": pa.array([name for name, _ in photos], pa.string()),
            "embedding": pa.array(rows, pa.list_(pa.float32())),
            "reason": pa.array(reasons, pa.string()),
        }
    ).replace_schema_metadata({SPACE: model.space_id.encode(), _PHOTOS: made_of})
    written = path.with_suffix(".tmp")
    pq.write_table(table, written)
    written.rename(path)
    return len(photos) - len(pixels)


def _digest(photos: list[Photo]) -> bytes:
    """Of names and bytes: a name alone may stand for another photo by now."""
    found = sha256()
    for name, data in photos:
        for item in (name.encode(), data if isinstance(data, bytes) else repr(data).encode()):
            found.update(len(item).to_bytes(8) + item)
    return found.hexdigest().encode()


def _join(parts: list[Path], output: Path) -> None:
    import pyarrow.parquet as pq

    written = output.with_name(f".{output.name}.tmp")
    schema = pq.read_schema(parts[0])
    schema = schema.with_metadata({SPACE: schema.metadata[SPACE]})
    with pq.ParquetWriter(written, schema) as writer:
        for part in parts:
            writer.write_table(pq.read_table(part).cast(schema))
    written.rename(output)


def _require_space(schema: Any, space_id: str, path: Path) -> None:
    found = (schema.metadata or {}).get(SPACE, b"none").decode()
    if found != space_id:
        raise Refused(
            f"{path} holds embeddings of the space {found}, and this model's is {space_id}; embed "
            "the photos again by this model"
        )


def _bytes_of(files: ImageFiles, name: str) -> bytes | None:
    try:
        return files.read(name)
    except BadImageError:
        return None
