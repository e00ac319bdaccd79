"""Embeds a set of photos by a released model into one Parquet file, in parts that survive a stop.

`photo_parts.py` says what a part and a row are; `embed_beam.py` spreads the parts over workers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from fedemb.embedding.photo_parts import Done, KeptParts, PhotoSource, Pixels, require_space
from fedemb.embedding.released import ReleasedModel
from fedemb.errors import InputError
from fedemb.files import require_output
from fedemb.storage import open_store


def embed_photos(
    uri: str,
    model: ReleasedModel,
    output: str | Path,
    *,
    id_column: str | None = None,
    beam_options: Sequence[str] = (),
    progress: Callable[[int], None] = lambda _: None,
) -> tuple[int, int]:
    """Embeds every photo of a folder or of Parquet files; of a classifier: its probabilities.

    What was embedded before a stop is kept beside the output and not embedded again.

    Args:
      uri: folder, searched to its depths, or Parquet file, folder of them or glob.
      model: checked for parity first.
      output: the file to write, local or in a bucket; written last of all.
      id_column: Parquet only: names the rows; None: file and row number.
      beam_options: of the Beam engine that does it; none: this process, part by part.
      progress: told how many photos are done; not by Beam.

    Returns:
      Photos, and how many of them could not be read.

    Raises:
      InputError: nothing there, or the output exists.
      Refused: this installation reads photos otherwise than training did, or what was kept is of
        another model or of other photos.
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
        from fedemb.embedding.embed_beam import embed_on_beam

        done = embed_on_beam(source, kept, model, beam_options)
    else:
        done = _embed_here(source, kept, model, progress)
    if not done:
        raise InputError(f"there is no photo at {uri}; check the address")
    kept.join(done, store, file)
    kept.remove()
    return sum(part.photos for part in done), sum(part.bad for part in done)


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


def read_embeddings(path: Path, space_id: str) -> tuple[list[str], np.ndarray]:
    """Reads the embeddings of one space.

    Returns:
      Names, and float32 [photos, dim]; rows without an embedding are left out.

    Raises:
      InputError: no such file, or no embedding in it.
      Refused: they are of another space.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path)
    except (OSError, pa.ArrowException) as error:
        raise InputError(f"{path} holds no embeddings; write it with `fedemb embed`") from error
    require_space(table.schema, space_id, path)
    table = table.filter(table["embedding"].is_valid())
    if not len(table):
        raise InputError(f"{path} holds no embedding: no photo could be read; embed other photos")
    values = table["embedding"].combine_chunks().flatten().to_numpy(zero_copy_only=False)
    return table["name"].to_pylist(), values.reshape(len(table), -1).astype(np.float32)
