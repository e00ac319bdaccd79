"""Embeds a set of photos with a released model into one Parquet file.

Rows are in the order of the source, see `photo_rows.py`. `embed_beam.py` spreads the photos over
workers.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from fedemb.errors import InputError
from fedemb.foundation.files import require_output
from fedemb.serving.photo_rows import decoded, rows, schema
from fedemb.serving.photo_source import PhotoSource
from fedemb.storage import open_store

if TYPE_CHECKING:
    from fedemb.serving.released import ReleasedModel


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

    Args:
      uri: folder, searched recursively, or Parquet or tar file, folder of such files, or glob.
      model: the release; checked for parity first.
      output: the file to write, local or in a bucket; written last.
      id_column: column of row names; None uses file and row number, and for tar the key.
      beam_options: options of the Beam engine, which writes `output-00000-of-00004.parquet` and so
          on without an order; empty embeds in this process.
      progress: called with the number of photos done; not called by Beam.

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
    if beam_options:
        from fedemb.serving.embed_beam import embed_on_beam

        photos, bad = embed_on_beam(source, model, address, beam_options)
    else:
        with tempfile.TemporaryDirectory(prefix="fedemb-") as scratch:
            whole = Path(scratch, "embeddings.parquet")
            photos, bad = _write(source, model, whole, progress)
            if photos > bad:
                store.upload(whole, file)
    if not photos:
        raise InputError(
            f"No photos at {uri}. Pass a folder of photos, a Parquet file or tar shards."
        )
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
        for unit in source.units():
            for pixels in decoded(source.photos(unit), model.reader):
                writer.write_table(rows(model, pixels, model.embed(pixels.images)))
                photos += len(pixels.names)
                bad += len(pixels.names) - len(pixels.images)
                progress(photos)
    return photos, bad
