"""Embeds a set of photos with a released model into one Parquet file, in resumable parts.

`photo_parts.py` defines parts and rows; `embed_beam.py` distributes the parts over workers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from fedemb.errors import InputError
from fedemb.foundation.files import require_output
from fedemb.serving.photo_parts import Done, KeptParts, PhotoSource, Pixels
from fedemb.serving.released import ReleasedModel
from fedemb.storage import open_store


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
