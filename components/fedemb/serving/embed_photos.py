"""Embeds a set of photos with a released model into one Parquet file, in resumable parts.

`photo_parts.py` defines parts and rows; `embed_beam.py` distributes the parts over workers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedemb.errors import InputError
from fedemb.foundation.files import open_regular, require_output
from fedemb.serving.photo_parts import Done, KeptParts, PhotoSource, Pixels, require_space
from fedemb.serving.released import ReleasedModel
from fedemb.storage import open_store

_LENGTH_ERROR = 1e-3
"""Maximum deviation of an embedding's length from 1."""


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
    beam_options: Sequence[str] = (),
    progress: Callable[[int], None] = lambda _: None,
) -> Embedded:
    """Embeds every photo of a folder, Parquet or tar; for classifiers, writes probabilities.

    Parts embedded before a stop are stored next to the output and reused.

    Args:
      uri: folder, searched recursively, or Parquet or tar file, folder of such files, or glob.
      model: the release; checked for parity first.
      output: the file to write, local or in a bucket; written last.
      id_column: column of row names; None uses file and row number, and for tar the key.
      beam_options: options of the Beam engine; empty embeds in this process, part by part.
      progress: called with the number of photos done; not called by Beam.

    Returns: Counts of photos, of unreadable photos, and of files without a photo file name.

    Raises:
      InputError: the source has no photos, or the output exists.
      Refused: this installation decodes photos differently from training, or stored parts belong to
          another model or other photos.
    """
    address = str(output)
    if "://" not in address:
        address = str(Path(address).expanduser().absolute())
    folder, _, file = address.rpartition("/")
    store = open_store(folder)
    if store.local_root is not None:
        require_output(store.local_root / file)
        require_output(store.local_root / f"{file}.parts")
    if store.exists(file):
        raise InputError(f"{output} exists; name another file, or remove it")
    model.check_parity()
    source = PhotoSource(uri, id_column)
    kept = KeptParts(f"{address}.parts", model.space_id, model.config.model.classes)
    if beam_options:
        from fedemb.serving.embed_beam import embed_on_beam

        done = embed_on_beam(source, kept, model, beam_options)
    else:
        done = _embed_here(source, kept, model, progress)
    if not done:
        raise InputError(
            f"No photos at {uri}. Pass a folder of photos, a Parquet file or tar shards."
        )
    kept.join(done, store, file)
    kept.remove()
    photos, bad = sum(part.photos for part in done), sum(part.bad for part in done)
    return Embedded(photos, bad, source.side_files())


def _embed_here(
    source: PhotoSource, kept: KeptParts, model: ReleasedModel, progress: Callable[[int], None]
) -> list[Done]:
    done: list[Done] = []
    for unit in source.units():
        for name, photos in source.parts(unit):
            part = kept.find(name, photos)
            if part is None:
                pixels = Pixels.read(name, photos, model.reader)
                part = kept.write(pixels, model.embed(pixels.images))
            done.append(part)
            progress(sum(part.photos for part in done))
    return done


def read_embeddings(path: Path, space_id: str, dim: int) -> tuple[list[str], np.ndarray]:
    """Reads the embeddings of one space from an untrusted file.

    Args:
      path: Parquet with the columns `name` and `embedding`.
      space_id: embedding-space id of the model.
      dim: dimension of an embedding.

    Returns:
      Names, and float32 [photos, dim] of unit length; rows without an embedding are left out.

    Raises:
      InputError: the file is missing, has no embedding, or has an invalid embedding.
      Refused: the embeddings belong to another space.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with open_regular(path) as file:
            table = pq.read_table(file)
    except (OSError, ValueError, pa.ArrowException) as error:
        raise InputError(f"{path} holds no embeddings; write it with `fedemb embed`") from error
    require_space(table.schema, space_id, path)
    if problem := _not_embeddings(table.schema):
        raise InputError(f"{path} {problem}; write it with `fedemb embed`")
    table = table.filter(table["embedding"].is_valid())
    if not len(table):
        raise InputError(
            f"{path} has no embedding, because no photo was readable; embed other photos"
        )
    names = table["name"].to_pylist()
    column = table["embedding"].combine_chunks()
    lengths = column.value_lengths().to_numpy(zero_copy_only=False)
    _require_rows(path, lengths == dim, f"has another number of values than {dim}")
    values = column.flatten().to_numpy(zero_copy_only=False).astype(np.float32).reshape(-1, dim)
    _require_rows(path, np.isfinite(values).all(axis=1), "has a value that is not finite")
    distance = np.abs(np.linalg.norm(values, axis=1) - 1.0)
    _require_rows(path, distance <= _LENGTH_ERROR, "is not of unit length")
    _require_rows(path, np.array([name is not None for name in names]), "has no name")
    return names, values


def _not_embeddings(schema: Any) -> str:
    """Returns the problem with the columns of a file of embeddings; empty if valid."""
    import pyarrow as pa

    for column in ("name", "embedding"):
        if len(schema.get_all_field_indices(column)) != 1:
            return f"does not have one column {column!r}"
    kind = schema.field("embedding").type
    lists = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    if not any(is_list(kind) for is_list in lists) or not pa.types.is_floating(kind.value_type):
        return f"has the column 'embedding' of type {kind}, expected a list of floats"
    name = schema.field("name").type
    if not (pa.types.is_string(name) or pa.types.is_large_string(name)):
        return f"has the column 'name' of type {name}, expected text"
    return ""


def _require_rows(path: Path, good: np.ndarray, problem: str) -> None:
    if not good.all():
        row = int(np.argmin(good))
        raise InputError(
            f"{path} is damaged: the embedding of photo {row} {problem}; embed the photos again"
        )
