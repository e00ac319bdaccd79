"""`fedemb check-data`: the data owner looks before anything runs, outside the guarantee.

It reads, validates and assigns records as the partition does, writes nothing, and returns counts,
which are not differentially private. Thresholds live here and not in the pipeline, because there
data must never decide whether a run exists.

Counts what a source holds, by the rules of the partition, without keeping an image.

For the data owner, before there is a run: every record is read, validated, decoded and assigned as
`transforms` does it, in this process. Memory is a few hundred bytes per image and a batch of files.
"""

from __future__ import annotations

import io
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image

from fedemb.config import EvaluationByHash, RunConfig, SourceConfig
from fedemb.data.identity import LEAST_CLASSES, Cell, Hasher
from fedemb.data.image_files import ImageFiles
from fedemb.data.photos import FORMATS, MAX_BYTES, MAX_PIXELS, MAX_TEXT_BYTES, PhotoReader
from fedemb.data.source_parts import csv_image_root, loose_files
from fedemb.data.sources import Batch, find_parts, image_files, read_part, split_part
from fedemb.data.tables import lines_in_quotes
from fedemb.errors import InputError
from fedemb.keys import derive
from fedemb.partition.prepare import (
    Assigner,
    Preparer,
    UserPart,
    columns_of,
    image_digests,
    merge,
    new_part,
    settle,
)
from fedemb.privacy.section import UNITS, count_of

_GREY = 12
"""How far the channels of a grey photo may lie apart, as JPEG leaves them."""
_PROBED = 300
"""Rows after which a table is refused if no image of theirs was found."""
_DIGEST = 8
"""Bytes of a public image's digest that are compared, as in `transforms`."""


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
      InputError: a file or column is missing, a file is damaged, or none of the first `_PROBED`
        images of a table is found.
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
        _require_images(counts, preparer.missing, config.data.source)
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


def _require_images(counts: Counter[str], missing: str, source: SourceConfig) -> None:
    if _PROBED <= counts["rows"] == counts["image_missing"]:
        raise InputError(
            f"None of the first {counts['rows']:,} rows has an image. Correct the names of images.",
            *missing_image_hint(missing, source),
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
    reader = PhotoReader(*config.model.photo)
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


BAD = {
    "user_id_missing": "no user id (empty or null)",
    "user_id_not_text": "user id of bytes that are not UTF-8 text, such as a raw UUID or Latin-1; "
    "write UTF-8 text",
    "user_id_inexact": "user id that is a decimal number with lost digits (a float from 2**53 = "
    "9007199254740992 on, or text like 1.5e+16), so several people may share it; write ids as text",
    "label_missing": "no class",
    "label_not_text": "class of bytes that are not UTF-8 text, such as Latin-1; write UTF-8 text",
    "line_not_a_row": "line that is not a row with the columns of line 1, such as a value with a "
    "comma outside quotes, or a quote that is not closed",
    "image_name_not_text": "image name of bytes that are not UTF-8 text; write UTF-8 text",
    "cohort_missing": "no cohort",
    "image_missing": "no image bytes (such as Parquet with paths alone), or no file of that name "
    "below data.source.image_root",
    "image_empty": "image of zero bytes",
    "file_too_large": f"image file of more than {MAX_BYTES:,} bytes, which is not read",
    "not_decodable": "bytes that are not a whole PNG, JPEG, WebP, GIF, HEIC or AVIF",
    "too_many_pixels": f"more than {MAX_PIXELS:,} pixels",
    "text_too_large": f"PNG with texts or a colour profile of more than {MAX_TEXT_BYTES:,} bytes",
}
"""Reason code of a bad record -> text; other records are left out although they are good."""
LEFT_OUT = {
    "side_file": "film, raw photo, sidecar, thumbnail, recycle bin or other file beside photos",
    "duplicate": "the same image again, of the same user",
    "in_public_set": "also in the public set",
    "dropped_over_cap": "beyond partition.max_images_per_user",
    "dropped_unlisted_class": "class that is not in the public list of classes",
    "dropped_cross_split": "training user with a held-out class, or the reverse",
    "dropped_other_cohort": "cohort not in partition.cohorts",
    "dropped_several_cohorts": "owner has records of several cohorts, so no block of their own",
}
_SPELLINGS_SHOWN = 5
_RARE = 0.01
"""Chance that is not worth a word."""


@dataclass(frozen=True)
class Check:
    """Result of the check. Private."""

    problems: tuple[str, ...]
    """Why the data should not be used as it is; empty: fine."""
    warnings: tuple[str, ...]
    """Allowed but questionable properties, as sentences."""
    rows: int
    bad_fraction: float
    bad: list[tuple[str, int]]
    """Reasons for which records are bad, and how many."""
    left_out: list[tuple[str, int]]
    """Reasons for which good records are left out."""
    used: int
    """Images that would train or evaluate."""
    facts: tuple[str, ...]
    """Numbers of users, images and virtual clients, as sentences."""


def check(config: RunConfig, progress: Callable[[int], None] = lambda _: None) -> Check:
    """Counts the private images.

    Raises:
      InputError: a file or column is missing, or a file is damaged.
      StorageError: a store cannot be read.
    """
    census = take_census(config, progress)
    rows, bad = census.counts["rows"], _counted(BAD, census)
    fraction = sum(count for _, count in bad) / max(rows, 1)
    return Check(
        problems=tuple(_problems(config, census, fraction)),
        warnings=(*remarks(census, config.data.source), *_warnings(config, census)),
        rows=rows,
        bad_fraction=fraction,
        bad=bad,
        left_out=_counted(LEFT_OUT, census),
        used=int(census.sizes.sum() + census.held_out_sizes.sum()),
        facts=tuple(_facts(config, census)),
    )


def _counted(texts: Mapping[str, str], census: Census) -> list[tuple[str, int]]:
    """Returns the text of each reason for which there are records, and their number."""
    return [(text, census.counts[name]) for name, text in texts.items() if census.counts[name]]


def _facts(config: RunConfig, census: Census) -> list[str]:
    unit = UNITS[config.policy.unit]
    found = [
        f"{count_of(len(sizes), unit.one)} {what}, with {count_of(int(sizes.sum()), 'image')}"
        for what, sizes in (("would train", census.sizes), ("held out", census.held_out_sizes))
    ]
    if len(census.sizes) and unit.one == "user":
        median, largest = float(np.median(census.sizes)), int(census.sizes.max())
        found.append(f"images of a training user: median {median:g}, largest {largest:,}")
    if config.task == "embedding" and len(census.group_sizes) > 1:
        groups = census.group_sizes
        found.append(
            f"users of a virtual client: smallest {groups.min():,}, median {np.median(groups):g}, "
            f"largest {groups.max():,}; {(groups == 0).sum():,} of {len(groups):,} are empty"
        )
    return found


def _problems(config: RunConfig, census: Census, fraction: float) -> list[str]:
    problems, units = inexact_ids(census), UNITS[config.policy.unit]
    rows, classes = census.counts["rows"], census.classes
    users, evaluation = len(census.sizes), len(census.held_out_sizes)
    if rows == 0:
        problems.append("No record passes data.source.where; check its values.")
    if fraction > config.data.max_bad_fraction:
        problems.append(
            f"{100 * fraction:.2f} % of the records are bad, more than data.max_bad_fraction = "
            f"{100 * config.data.max_bad_fraction:g} %; correct the data or raise the threshold."
        )
    if users < config.policy.users_lower_bound and config.purpose == "release":
        problems.append(
            f"{users:,} {units.many} would train, fewer than policy.users_lower_bound = "
            f"{config.policy.users_lower_bound:,}, which the plan rests on; lower the bound."
        )
    if rows and not users + evaluation:
        problems.append("No record can be used, for the reasons above.")
    elif rows and evaluation == 0:
        problems.append(f"No {units.one} is held out for evaluation; check partition.evaluation.")
    if rows and (few := too_few_classes(config, classes)):
        problems.append(few)
    if shared := _shared_classes(config, census):
        problems.append(
            f"{shared:,} classes are in training and in evaluation, as users or classes cross the "
            "values of partition.evaluation; choose another column, or hold out by hash."
        )
    listed = len(config.model.classes)
    if rows and classes < listed:
        problems.append(
            f"{listed - classes} of the {listed} classes of model.classes have no image."
            f"{other_spellings(config.model.classes, census.labels)} Correct the labels, or list "
            "the classes of the data."
        )
    return problems


def other_spellings(listed: Sequence[str], labels: Collection[str]) -> str:
    """Returns a sentence about labels that are listed classes in another spelling; else nothing."""
    by_fold = {_folded(label): label for label in sorted(labels, reverse=True)}
    missing = [name for name in listed if name not in labels]
    close = [(name, by_fold[_folded(name)]) for name in missing if _folded(name) in by_fold]
    if close:
        shown = ", ".join(f"{label!r} for {name!r}" for name, label in close[:_SPELLINGS_SHOWN])
        return f" The data have {shown}."
    numbers = [label for label in labels if label.isdecimal()]
    if missing and numbers and len(numbers) == len(labels):
        return (
            f" All labels are numbers ({', '.join(sorted(numbers, key=int)[:3])}, ...), and the "
            "classes are names: set data.source.label_names to the names in the order of the "
            "numbers."
        )
    return ""


def _folded(name: str) -> str:
    return re.sub(r"[\W_]+", "", unicodedata.normalize("NFKC", name)).casefold()


def inexact_ids(census: Census) -> list[str]:
    """Returns the problem of ids that lost digits; empty: no problem."""
    count = census.counts["user_id_inexact"]
    if not count:
        return []
    return [
        f"{count:,} records have a user id that is a decimal number with lost digits: a float from "
        "2**53 = 9007199254740992 on, or text such as 1.5e+16. Several people may share such an "
        "id. Write the ids as text and export the data again."
    ]


def spellings(census: Census) -> list[str]:
    """Returns a warning about classes that differ in case or spaces only; empty: no such class."""
    forms: dict[str, list[str]] = {}
    for label in sorted(census.labels):
        forms.setdefault(" ".join(label.split()).casefold(), []).append(label)
    twice = [" and ".join(map(repr, names)) for names in forms.values() if len(names) > 1]
    shown = ", ".join(twice[:_SPELLINGS_SHOWN])
    return [f"Classes differ in case only: {shown}. Merge them if they are the same."][: len(twice)]


def missing_image_hint(missing: str, source: SourceConfig) -> list[str]:
    """Returns a sentence about an image file that a table names and that does not exist."""
    if not missing or source.file_format != "csv":
        return []
    return [
        f"No file {missing!r} below {csv_image_root(source)}, nor with an ending such as "
        ".jpg; correct the names, or set data.source.image_root."
    ]


_REMARKS = {
    "user_id_as_decimal": ("record", "with a user id written as a decimal (1.0); it counts as 1."),
    "lines_in_quotes": (
        "line",
        "of the table inside quotes, as a part of the value above. Close each quote, or the rows "
        "below it are lost.",
    ),
    "loose_files": (
        "file",
        "beside the folders of users, and so of no user: left out. Move each into the folder of "
        "its owner.",
    ),
}
"""Count of a census -> noun and rest of a sentence about it."""


def remarks(census: Census, source: SourceConfig) -> list[str]:
    """Returns sentences about what was read, with the first bad record of each reason."""
    read = [(reason, found) for reason, found in census.examples.items() if found]
    return [
        *(f"{re.split('[,;]', BAD[reason])[0]}, for example: {found}" for reason, found in read),
        *missing_image_hint(census.missing, source),
        *spellings(census),
        *(
            f"{count_of(census.counts[name], noun)} {text}"
            for name, (noun, text) in _REMARKS.items()
            if census.counts[name]
        ),
    ]


def _warnings(config: RunConfig, census: Census) -> list[str]:
    """Warns of photos with several owners, and of limits on images that no user reaches.

    The warning suggests no number: it would be public, and one user's data would choose it.
    """
    sizes = census.sizes
    if not len(sizes) or config.policy.unit == "image":
        return []
    found: list[str] = []
    if several := census.counts["photos_of_several"]:
        found.append(
            f"{count_of(several, 'photo')} of several users: each owner keeps a copy, and the "
            "guarantee protects one owner at a time. Remove the copies if a photo has one owner."
        )
    largest, asked = int(sizes.max()), dict[str, int]()
    if config.task == "classification":
        unit_gradient = config.training.unit_gradient
        asked["training.unit_gradient.images_per_unit"] = unit_gradient.images_per_unit
    if config.mechanism.samples_images:
        asked["partition.max_images_per_user"] = config.partition.max_images_per_user
    return found + [
        f"No training user has more than {count_of(largest, 'image')}; {name} is {most}."
        for name, most in asked.items()
        if most > largest
    ]


def too_few_classes(config: RunConfig, classes: int) -> str:
    """Returns the problem if few shared classes are held out at random; empty: no problem."""
    evaluation, source = config.partition.evaluation, config.data.source
    if not isinstance(evaluation, EvaluationByHash) or evaluation.classes or config.model.classes:
        return ""
    if source.label_scope == "user" or source.columns.label is None:
        return ""
    fraction = evaluation.fraction
    chance = (1 - fraction) ** classes + classes * fraction * (1 - fraction) ** (classes - 1)
    if chance <= _RARE:
        return ""
    return (
        f"{classes:,} shared classes are held out by a coin of {fraction:g} each; under "
        f"{100 * chance:.0f} % of keys fewer than {LEAST_CLASSES} are left to evaluate with. List "
        "the classes in partition.evaluation.classes, and that share of them is held out."
    )


def _shared_classes(config: RunConfig, census: Census) -> int:
    """Classes on both sides, where a named column decides the split."""
    by_value = config.partition.evaluation.by == "value" and not config.model.classes
    return census.shared_classes if by_value and config.data.source.label_scope == "global" else 0
