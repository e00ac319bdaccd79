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
from fedemb.data.pixels import encode_png
from fedemb.data.source_parts import loose_files
from fedemb.data.sources import Batch, find_parts, image_files, read_part, split_part
from fedemb.keys import derive
from fedemb.steps.partition_users.assignment import Assigner, columns_of
from fedemb.steps.partition_users.prepare import (
    Images,
    Prepared,
    Preparer,
    UserPart,
    image_digests,
    merge,
    new_part,
    settle,
)

SAMPLES = 60
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
    class_sizes: Mapping[int, tuple[int, int]]
    """Class -> its images and the users who have one; of a classifier, by index in
    `model.classes`."""
    median_side: float
    """Shorter side of a photo as stored, in pixels; of the first batch."""
    colour: bool
    """Whether any sample is more than shades of grey."""
    labels: frozenset[str]
    """Classes of records, the first thousand that were met."""
    missing: str
    """The first image file that was not found; empty: all were found."""
    examples: Mapping[str, str]
    """Reason of a bad record -> what was read of the first one."""
    samples: list[bytes]
    """The first image of some training users, canonical PNGs."""


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
    preparer = Preparer(
        config, hasher, None, lambda digest: digest[:_DIGEST] in known, image=_pixels
    )
    counts: Counter[str] = Counter()
    users: dict[bytes, UserPart] = {}
    samples: dict[bytes, tuple[bytes, bytes]] = {}
    sides: list[int] = []
    files = image_files(config.data.source)
    cap = config.partition.max_images_per_user
    for batch in _batches(config.data.source, columns_of(config)):
        prepared = preparer.prepare(batch)
        counts.update(prepared.counts)
        _sample(samples, prepared)
        sides = sides or _sides(batch, files)
        for key, (cohort, subgroup, train, held, trained, held_out) in prepared.parts.items():
            part = (cohort, subgroup, _bare(train), _bare(held), trained, held_out)
            users[key] = merge(users.get(key, new_part()), part, cap)
        progress(counts["rows"])
    counts["loose_files"] = loose_files(config.data.source)
    counts["lines_in_quotes"] = _lines_in_quotes(config.data.source)
    return _settled(
        config, preparer, hasher, counts=counts, users=users, samples=samples, sides=sides
    )


def _lines_in_quotes(source: SourceConfig) -> int:
    """Lines of a table that continue a value in quotes."""
    if source.file_format != "csv":
        return 0
    return sum(lines_in_quotes(part) for part in find_parts(source, []))


def _batches(source: SourceConfig, columns: list[str]) -> Iterator[Batch]:
    for part in find_parts(source, columns):
        for piece in split_part(part):
            yield from read_part(source, piece, columns)


def _pixels(data: Cell, reader: PhotoReader) -> tuple[np.ndarray, bytes]:
    """A photo as it is sampled: a PNG of each would take a fifth of the time."""
    pixels = reader.read(data)
    return pixels, pixels.tobytes()


def _bare(images: Images) -> Images:
    return {digest: (label, count, b"") for digest, (label, count, _) in images.items()}


def _sample(samples: dict[bytes, tuple[bytes, bytes]], prepared: Prepared) -> None:
    """Keeps the least image of the users with the least keys."""
    for key, part in prepared.parts.items():
        least = min(((digest, png) for digest, (_, _, png) in part[2].items()), default=None)
        if least is not None:
            samples[key] = min(least, samples.get(key, least))
    for key in sorted(samples)[SAMPLES:]:
        del samples[key]


def _digests(config: RunConfig, source: SourceConfig, hasher: Hasher) -> set[bytes]:
    reader = PhotoReader.of(config.model, config.data.max_pixels)
    files, found = image_files(source), set[bytes]()
    for batch in _batches(source, []):
        for digest in image_digests(batch.images, files, reader, hasher):
            found.add(digest[:_DIGEST])
    return found


def _settled(
    config: RunConfig,
    preparer: Preparer,
    hasher: Hasher,
    *,
    counts: Counter[str],
    users: dict[bytes, UserPart],
    samples: dict[bytes, tuple[bytes, bytes]],
    sides: list[int],
) -> Census:
    assigner = Assigner(config, hasher, None)
    sizes: tuple[list[int], list[int]] = ([], [])
    classes: tuple[Counter[int], Counter[int]] = (Counter(), Counter())
    training: list[bytes] = []
    images_of: Counter[int] = Counter()
    for key, part in users.items():
        settled = settle(key, part, config.partition.cohorts, assigner, counts)
        if settled is not None:
            sizes[settled.held_out].append(len(settled.images))
            labels = [label for _, (label, _, _) in settled.images]
            classes[settled.held_out].update(set(labels))
            images_of.update(labels)
            if not settled.held_out:
                training.append(key)
    groups = np.zeros(config.partition.virtual_clients, np.int64)
    if training:
        placed = next(hasher.groups(training, 1, config.partition.virtual_clients))
        groups = np.bincount(placed, minlength=config.partition.virtual_clients)
    size, channels = config.model.image_size, config.model.channels
    kept = [
        np.frombuffer(samples[key][1], np.uint8).reshape(size, size, channels)
        for key in sorted(samples.keys() & set(training))
    ]
    owners = classes[0] + classes[1]
    of_users = Counter(digest for part in users.values() for digest in {*part[2], *part[3]})
    counts["photos_of_several"] = sum(count > 1 for count in of_users.values())
    return Census(
        counts=counts,
        sizes=np.array(sizes[0], np.int64),
        held_out_sizes=np.array(sizes[1], np.int64),
        group_sizes=groups,
        classes=len(owners),
        common_classes=sum(count > 1 for count in owners.values()),
        shared_classes=len(classes[0].keys() & classes[1].keys()),
        class_sizes={label: (images_of[label], owners[label]) for label in sorted(owners)},
        median_side=float(np.median(sides)) if sides else 0.0,
        colour=any(int(np.ptp(pixels.astype(int), axis=-1).max()) > _GREY for pixels in kept),
        labels=frozenset(preparer.labels),
        missing=preparer.missing,
        examples=preparer.examples,
        samples=[encode_png(pixels) for pixels in kept],
    )


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
