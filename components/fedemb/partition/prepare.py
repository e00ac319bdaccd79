"""From a batch of rows to what each of its users owns: validate, decode, hash, drop, count.

Plain functions and classes without Beam. A `UserPart` is what is known of one user so far; parts
merge in any order to the same result, so the per-user cap is a top-N combiner that never holds more
than N images of a user.

Where a record goes: to training, to evaluation, or nowhere. A function of the record alone.

Held out are users, and with shared classes (`label_scope: global`) classes too. A record trains
only if neither its user nor its class is held out, and evaluates only if both are; what lies
between would put a held-out user or class into training, or the reverse, and is dropped. With
`partition.evaluation.by: value` a named column decides, and users and classes are taken to lie
inside one value (`fedemb check-data` tells if they do not); a user on both sides is held out whole.
"""

from __future__ import annotations

import hashlib
import heapq
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from fedemb.config import EvaluationByHash, EvaluationByValue, RunConfig
from fedemb.data.identity import (
    NOT_TEXT,
    Cell,
    Hasher,
    canonical_text,
    is_whole_decimal,
    name_problem,
    name_text,
)
from fedemb.data.image_files import BadRecord, ImageFiles, excerpt
from fedemb.data.photos import BadImageError, PhotoReader
from fedemb.data.pixels import canonical_image
from fedemb.data.sources import Batch, image_files

_REMEMBERED = 1 << 16


def columns_of(config: RunConfig) -> list[str]:
    """Columns the private source must have, besides the image."""
    columns = config.data.source.columns
    named = [columns.user_id, columns.label, columns.cohort, columns.subgroup]
    if config.partition.evaluation.by == "value":
        named.append(config.partition.evaluation.column)
    return list(dict.fromkeys(name for name in named if name))


@dataclass(frozen=True, slots=True)
class Assignment:
    """Decision about one record, made before its image is read."""

    user_key: bytes
    class_id: int
    held_out: bool
    """To evaluation rather than training."""
    dropped: str = ""
    """Why it goes nowhere; empty: it goes somewhere."""


class Assigner:
    """Decides about records; remembers the users and classes it saw last."""

    def __init__(self, config: RunConfig, hasher: Hasher, blocks: frozenset[str] | None):
        """Takes what decides.

        Args:
          config: source and partition sections are used.
          hasher: keyed hashes.
          blocks: ledger blocks whose users may train; None: all.
        """
        self._config, self._hasher, self._blocks = config, hasher, blocks
        columns = config.data.source.columns
        self._has_cohorts = columns.cohort is not None
        self._cohorts = frozenset(config.partition.cohorts)
        self._shared = config.data.source.label_scope == "global" and columns.label is not None
        named = map(name_text, config.model.classes)
        self._classes = {name: number for number, name in enumerate(named)}
        evaluation = config.partition.evaluation
        self._by_hash = evaluation if isinstance(evaluation, EvaluationByHash) else None
        self._listed: frozenset[str] = frozenset()
        if self._by_hash:
            self._listed = frozenset(map(str, map(name_text, self._by_hash.classes)))
            self._held_classes = hasher.held_out_classes(self._listed, self._by_hash.fraction)
        self._values: set[str | None] = set()
        if isinstance(evaluation, EvaluationByValue):
            self._values = {name_text(value) for value in evaluation.values} - {None}
        self._user = lru_cache(_REMEMBERED)(self._decide_user)
        self._class = lru_cache(_REMEMBERED)(self._decide_class)

    def assign(self, user_id: str, label: str, cohort: str | None, value: Cell) -> Assignment:
        """Decides about one record.

        Args:
          user_id: canonical.
          label: canonical class; empty if every user is one class.
          cohort: canonical; None without a cohort column.
          value: of the column that decides the split, if one does.
        """
        user_key, user_held, may_train = self._user(user_id)
        class_id, class_held = self._class(label, b"" if self._shared else user_key)
        if self._by_hash is None:
            user_held = class_held = name_text(value) in self._values
        dropped = ""
        if self._classes:  # users are held out, classes never: the list is public
            class_id, class_held = self._classes.get(label, -1), user_held
        if (self._classes and class_id == -1) or (self._listed and label not in self._listed):
            dropped = "dropped_unlisted_class"
        elif self._shared and user_held != class_held:
            dropped = "dropped_cross_split"
        elif not user_held and not may_train:
            dropped = "dropped_block_not_reserved"
        elif cohort is not None and cohort not in self._cohorts:
            dropped = "dropped_other_cohort"
        return Assignment(user_key, class_id, user_held, dropped)

    def block(self, user_key: bytes, cohort: str | None) -> str:
        """Ledger block of a user, `cohort/bucket`; without a cohort column all are of the one."""
        partition = self._config.partition
        name = cohort if cohort is not None else partition.cohorts[0]
        return f"{name}/{self._hasher.bucket(user_key, partition.blocks_per_cohort)}"

    def may_train(self, user_key: bytes, cohort: str | None) -> bool:
        """Whether the user's block is reserved."""
        return self._blocks is None or self.block(user_key, cohort) in self._blocks

    def _decide_user(self, user_id: str) -> tuple[bytes, bool, bool]:
        """Returns key, held out, and False only if the block is known and not reserved."""
        key = self._hasher.user_key(user_id)
        held = self._by_hash is not None and self._hasher.holds_out_user(
            key, self._by_hash.fraction
        )
        return key, held, self._has_cohorts or self.may_train(key, None)

    def _decide_class(self, label: str, user_key: bytes) -> tuple[int, bool]:
        if self._listed:
            held = label in self._held_classes
        else:
            held = self._by_hash is not None and self._hasher.holds_out_class(
                label, self._by_hash.fraction
            )
        return self._hasher.class_id(label, user_key), held


_CHUNK = 64
_LABELS = 1000

Images = dict[bytes, tuple[int, int, bytes]]
"""Image digest -> class, how often it came, canonical PNG."""
UserPart = tuple[str | None, str | None, Images, Images, int, int]
"""Cohort, subgroup, images to train on, images held out, and how many came of each."""
Reject = tuple[str, str, str, str]
"""Reason, user, class, image (file name, or SHA-256 of its bytes). Raw."""
SEVERAL_COHORTS = "\0several"
"""Cohort of a user whose records name more than one; no text names it (see `canonical_text`)."""


def new_part() -> UserPart:
    """State of a user before their first record."""
    return None, None, {}, {}, 0, 0


def merge(left: UserPart, right: UserPart, cap: int) -> UserPart:
    """Joins two parts of one user: commutative, associative, at most `cap` images a side.

    The images kept are those with the smallest keyed digests. A kept image was kept in every part
    it came in, so its count is exact.
    """
    return (
        _one_cohort(left[0], right[0]),
        _least(left[1], right[1]),
        _merge_images(left[2], right[2], cap),
        _merge_images(left[3], right[3], cap),
        left[4] + right[4],
        left[5] + right[5],
    )


def _one_cohort(left: str | None, right: str | None) -> str | None:
    """The cohort both name; a rule that picked one would pick another once records come or go."""
    if left is None or right is None:
        return left if right is None else right
    return left if left == right else SEVERAL_COHORTS


def _least(left: str | None, right: str | None) -> str | None:
    if left is None or right is None:
        return left if right is None else right
    return min(left, right)


def _merge_images(left: Images, right: Images, cap: int) -> Images:
    if len(left) < len(right):
        left, right = right, left
    merged = dict(left)
    for digest, (label, count, png) in right.items():
        known = merged.get(digest)
        merged[digest] = (
            (label, count, png)
            if known is None
            else (min(label, known[0]), count + known[1], min(png, known[2]))
        )
    return capped(merged, cap)


def capped(images: Images, cap: int) -> Images:
    """Returns the `cap` images with the smallest digests."""
    if len(images) <= cap:
        return images
    return {digest: images[digest] for digest in heapq.nsmallest(cap, images)}


@dataclass(frozen=True)
class Settled:
    """A user who is used."""

    held_out: bool
    images: list[tuple[bytes, tuple[int, int, bytes]]]
    """As in `Images`, by digest."""
    copies: int
    """How often the images came, all together."""


def settle(
    user_key: bytes,
    part: UserPart,
    cohorts: Collection[str],
    assigner: Assigner,
    counts: Counter[str],
) -> Settled | None:
    """Decides which side a whole user is on, or drops the user and counts the reason."""
    cohort, _, train, held_out, trained, held = part
    images, came = train, trained
    if held_out:  # the whole user is held out, whatever else they own
        counts["dropped_cross_split"] += trained
        images, came = held_out, held
    if not images:
        return None
    reason = ""
    if cohort == SEVERAL_COHORTS:  # which block is charged must not depend on what came or went
        reason = "dropped_several_cohorts"
    elif cohort is not None and cohort not in cohorts:
        reason = "dropped_other_cohort"
    elif not held_out and not assigner.may_train(user_key, cohort):
        reason = "dropped_block_not_reserved"
    if reason:
        counts[reason] += came
        return None
    copies = sum(count for _, count, _ in images.values())
    counts["duplicate"] += copies - len(images)
    counts["dropped_over_cap"] += came - copies
    return Settled(bool(held_out), sorted(images.items()), copies)


@dataclass
class Prepared:
    """Content of one batch."""

    parts: dict[bytes, UserPart] = field(default_factory=dict)
    """By user key."""
    rejects: list[Reject] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class _Row:
    """A row that is worth decoding."""

    goes: Assignment
    user_id: str
    label: str
    image: Cell


class Preparer:
    """Turns batches into parts of users. One per worker; for one thread at a time."""

    def __init__(
        self,
        config: RunConfig,
        hasher: Hasher,
        blocks: frozenset[str] | None,
        in_public_set: Callable[[bytes], bool],
        *,
        image: Callable[[Cell, PhotoReader], tuple[np.ndarray, bytes]] = canonical_image,
    ):
        """Takes what the decisions depend on.

        Args:
          config: data, partition and model sections are used.
          hasher: keyed hashes.
          blocks: ledger blocks whose users may train; None: all.
          in_public_set: whether an image digest is also in the public set.
          image: reads a photo: its pixels, and the bytes that are kept of it.
        """
        self._config = config
        self._hasher = hasher
        self._assigner = Assigner(config, hasher, blocks)
        self._in_public_set = in_public_set
        self._image = image
        self._cap = config.partition.max_images_per_user
        self._columns = config.data.source.columns
        self._files = image_files(config.data.source)
        self._reader = PhotoReader(*config.model.photo)
        self.labels: set[str] = set()
        """Classes of the records, the first thousand. Private."""
        self.examples: dict[str, str] = {}
        """Reason of a bad record -> what was read of the first one. Private."""
        self._pool = ThreadPoolExecutor(min(4, os.cpu_count() or 1))

    @property
    def missing(self) -> str:
        """The first image file that was not found, see `ImageFiles.missing`."""
        return self._files.missing if self._files else ""

    def prepare(self, batch: Batch) -> Prepared:
        """Validates, decodes and hashes the rows of a batch; never raises for what is in them."""
        prepared = Prepared()
        prepared.counts["rows"] = len(batch)
        rows = list(self._rows(batch, prepared))
        chunks = [rows[start : start + _CHUNK] for start in range(0, len(rows), _CHUNK)]
        for chunk, decoded in zip(chunks, self._pool.map(self._decode, chunks), strict=True):
            for row, (reason, digest, png) in zip(chunk, decoded, strict=True):
                if reason:
                    _reject(prepared, reason, row.user_id, row.label, row.image)
                else:
                    self._add(prepared.parts, row.goes, digest, png)
        return prepared

    def _add(
        self, parts: dict[bytes, UserPart], goes: Assignment, digest: bytes, png: bytes
    ) -> None:
        """Adds one image to the part of its user, in place."""
        cohort, subgroup, *sides, trained, held = parts.get(goes.user_key) or new_part()
        side: Images = sides[goes.held_out]
        label, count, least = side.get(digest, (goes.class_id, 0, png))
        side[digest] = (min(label, goes.class_id), count + 1, min(least, png))
        if len(side) > 2 * self._cap:
            sides[goes.held_out] = capped(side, self._cap)
        came = (trained, held + 1) if goes.held_out else (trained + 1, held)
        parts[goes.user_key] = (cohort, subgroup, sides[0], sides[1], *came)

    def _rows(self, batch: Batch, prepared: Prepared) -> Iterator[_Row]:
        """Rows of users and classes this run may touch; others are rejected or counted."""
        names = self._columns
        evaluation = self._config.partition.evaluation
        split = evaluation.column if isinstance(evaluation, EvaluationByValue) else None
        wanted = (names.user_id, names.label, names.cohort, names.subgroup, split)
        nothing = [None] * len(batch)
        columns = [batch.columns[name] if name else nothing for name in wanted]
        for image, *values, value in zip(batch.images, *columns, strict=True):
            if isinstance(image, BadRecord):
                self.examples.setdefault(image.reason, image.read)
                _reject(prepared, image.reason, "", "", image.read)
                continue
            user_id, label, cohort, subgroup = map(name_text, values)
            if not names.user_id:
                user_id = _own_unit(image)
            elif user_id is not None and is_whole_decimal(values[0]):
                prepared.counts["user_id_as_decimal"] += 1
            reason = (
                (name_problem(values[0]) if user_id is None else "")
                or (_bad_label(name_problem(values[1])) if names.label and label is None else "")
                or ("cohort_missing" if names.cohort and cohort is None else "")
            )
            if reason or user_id is None:
                wrong = values[1] if reason == "label_not_text" else values[0]
                if isinstance(wrong, bytes) and reason in (NOT_TEXT, "label_not_text"):
                    self.examples.setdefault(reason, excerpt(wrong))
                _reject(prepared, reason, user_id or "", label or "", image)
                continue
            if label and len(self.labels) < _LABELS:
                self.labels.add(label)
            goes = self._assigner.assign(user_id, label or "", cohort, value)
            if cohort or subgroup:
                known = prepared.parts.get(goes.user_key) or new_part()
                named = (_one_cohort(known[0], cohort), _least(known[1], subgroup))
                prepared.parts[goes.user_key] = (*named, *known[2:])
            if goes.dropped:
                prepared.counts[goes.dropped] += 1
            else:
                yield _Row(goes, user_id, label or "", image)

    def _decode(self, rows: list[_Row]) -> list[tuple[str, bytes, bytes]]:
        """For each row: reason to drop it or empty, digest, canonical PNG."""
        results: list[tuple[str, bytes, bytes]] = []
        for row in rows:
            try:
                data = row.image
                if self._files is not None:
                    data = self._files.read(data)
                pixels, png = self._image(data, self._reader)
            except BadImageError as bad:
                results.append((bad.reason, b"", b""))
                continue
            digest = self._hasher.image_digest(pixels)
            if self._in_public_set(digest):
                results.append(("in_public_set", b"", b""))
            else:
                results.append(("", digest, png))
        return results


def image_digests(
    images: Iterable[Cell], files: ImageFiles | None, reader: PhotoReader, hasher: Hasher
) -> Iterator[bytes]:
    """Yields the keyed digest of each image that can be read."""
    for image in images:
        with suppress(BadImageError):
            yield hasher.image_digest(reader.read(files.read(image) if files else image))


def _bad_label(problem: str) -> str:
    return "label_not_text" if problem == NOT_TEXT else "label_missing"


def _own_unit(image: Cell) -> str | None:
    """Id of an image that is a unit of its own: its file name, or a digest of its bytes."""
    if isinstance(image, bytes):
        return hashlib.sha256(image).hexdigest()
    return canonical_text(image)


def _reject(prepared: Prepared, reason: str, user_id: str, label: str, image: Cell) -> None:
    prepared.counts[reason] += 1
    name = hashlib.sha256(image).hexdigest() if isinstance(image, bytes) else image
    prepared.rejects.append((reason, user_id, label, name if isinstance(name, str) else ""))
