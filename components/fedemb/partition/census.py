"""Counts what a source holds, by the rules of the partition, without keeping an image.

For the data owner, before there is a run: every record is read, validated, decoded and assigned as
`transforms` does it, in this process. Memory is a few hundred bytes per image and a batch of files.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from PIL import Image

from fedemb.config import RunConfig, SourceConfig
from fedemb.data.formats.csv_files import lines_in_quotes
from fedemb.data.formats.image_files import ImageFiles
from fedemb.data.hashing import Hasher
from fedemb.data.identity import Cell
from fedemb.data.photos import FORMATS, PhotoReader
from fedemb.data.source_parts import loose_files
from fedemb.data.sources import Batch, find_parts, image_files, read_part, split_part
from fedemb.keys import derive
from fedemb.partition.assignment import Assigner, columns_of
from fedemb.partition.prepare import (
    Preparer,
    UserPart,
    image_digests,
    merge,
    new_part,
    settle,
)

_GREY = 12
"""How far the channels of a grey photo may lie apart, as JPEG leaves them."""
_DIGEST = 8
"""Bytes of a public image's digest that are compared, as in `public_set`."""


@dataclass(frozen=True)
class Census:
    """Counts of a source. Private."""

    counts: Counter[str]
    """Records by what became of them, and `rows`."""
    sizes: np.ndarray
    """Images of each training user, int64 [users]."""
    held_out_sizes: np.ndarray
    """Images of each evaluation user, int64 [users]."""
    group_sizes: np.ndarray
    """Users of each virtual client of the first grouping, int64 [virtual_clients]."""
    classes: int
    """Different classes of the users, as far as their images are used."""
    common_classes: int
    """Classes of more than one user."""
    shared_classes: int
    """Classes on both sides of the split."""
    median_side: float
    """Shorter side of a photo as stored, in pixels; of the first batch."""
    colour: bool
    """Whether any photo of the first batch is more than shades of grey."""
    labels: frozenset[str]
    """Classes of records, the first thousand that were met."""
    missing: str
    """The first image file that was not found; empty: all were found."""
    examples: Mapping[str, str]
    """Reason of a bad record -> what was read of the first one."""


def take_census(config: RunConfig, progress: Callable[[int], None] = lambda _: None) -> Census:
    """Reads all records of the private source.

    A throwaway key takes the place of the policy's: which users are held out differs from the run.

    Raises:
      InputError: a file or column is missing, or a file is damaged.
      StorageError: a store cannot be read.
    """
    hasher = Hasher(derive(b"fedemb", "check-data"))
    public = config.pretraining.source
    known = _digests(config, public, hasher) if public is not None else set[bytes]()
    counts: Counter[str] = Counter()
    users: dict[bytes, UserPart] = {}
    sides: list[int] = []
    coloured: list[bool] = []

    def pixels_of(data: Cell, reader: PhotoReader) -> tuple[np.ndarray, bytes]:
        """Reads a photo; nothing of it is kept. A PNG of each would take a fifth of the time."""
        pixels = reader.read(data)
        if not counts["rows"]:
            coloured.append(int(np.ptp(pixels.astype(int), axis=-1).max()) > _GREY)
        return pixels, b""

    preparer = Preparer(
        config, hasher, None, lambda digest: digest[:_DIGEST] in known, image=pixels_of
    )
    files = image_files(config.data.source)
    cap = config.partition.max_images_per_user
    for batch in _batches(config.data.source, columns_of(config)):
        prepared = preparer.prepare(batch)
        sides = sides or _sides(batch, files)
        for key, part in prepared.parts.items():
            users[key] = merge(users.get(key, new_part()), part, cap)
        counts.update(prepared.counts)
        progress(counts["rows"])
    counts["loose_files"] = loose_files(config.data.source)
    counts["lines_in_quotes"] = _lines_in_quotes(config.data.source)
    of_users = Counter(digest for part in users.values() for digest in {*part[2], *part[3]})
    counts["photos_of_several"] = sum(count > 1 for count in of_users.values())
    sizes, classes, training = _settled(config, hasher, users, counts)
    groups = config.partition.virtual_clients
    placed = next(hasher.groups(training, 1, groups)) if training else np.zeros(0, np.int64)
    owners = classes[0] + classes[1]
    return Census(
        counts=counts,
        sizes=np.array(sizes[0], np.int64),
        held_out_sizes=np.array(sizes[1], np.int64),
        group_sizes=np.bincount(placed, minlength=groups),
        classes=len(owners),
        common_classes=sum(count > 1 for count in owners.values()),
        shared_classes=len(classes[0].keys() & classes[1].keys()),
        median_side=float(np.median(sides)) if sides else 0.0,
        colour=any(coloured),
        labels=frozenset(preparer.labels),
        missing=preparer.missing,
        examples=preparer.examples,
    )


def _settled(
    config: RunConfig, hasher: Hasher, users: Mapping[bytes, UserPart], counts: Counter[str]
) -> tuple[tuple[list[int], list[int]], tuple[Counter[int], Counter[int]], list[bytes]]:
    """Returns images of each user and owners of each class, per side, and keys that train."""
    sizes: tuple[list[int], list[int]] = ([], [])
    classes: tuple[Counter[int], Counter[int]] = (Counter(), Counter())
    training: list[bytes] = []
    assigner = Assigner(config, hasher, None)
    for key, part in users.items():
        settled = settle(key, part, config.partition.cohorts, assigner, counts)
        if settled is not None:
            sizes[settled.held_out].append(len(settled.images))
            classes[settled.held_out].update({label for _, (label, _, _) in settled.images})
            training += [] if settled.held_out else [key]
    return sizes, classes, training


def _lines_in_quotes(source: SourceConfig) -> int:
    """Lines of a table that continue a value in quotes."""
    if source.file_format != "csv":
        return 0
    return sum(lines_in_quotes(part) for part in find_parts(source, []))


def _batches(source: SourceConfig, columns: list[str]) -> Iterator[Batch]:
    for part in find_parts(source, columns):
        for piece in split_part(part):
            yield from read_part(source, piece, columns)


def _digests(config: RunConfig, source: SourceConfig, hasher: Hasher) -> set[bytes]:
    reader = PhotoReader.of(config.model, config.data.max_pixels)
    files, found = image_files(source), set[bytes]()
    for batch in _batches(source, []):
        for digest in image_digests(batch.images, files, reader, hasher):
            found.add(digest[:_DIGEST])
    return found


def _sides(batch: Batch, files: ImageFiles | None) -> list[int]:
    """Shorter sides of the photos of a batch, from their headers."""
    found: list[int] = []
    for image in batch.images:
        try:
            data = files.read(image) if files else image
            if isinstance(data, bytes):
                found.append(min(Image.open(io.BytesIO(data), formats=FORMATS).size))
        except Exception:  # whatever a header throws: the record is counted elsewhere
            continue
    return found
