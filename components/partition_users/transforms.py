"""The Beam graph: read, prepare, cap per user, shard, write. Deterministic and idempotent.

Its shape is what makes it scale (asserted in tests on the graph): nothing of data size is a side
input; users are capped by a combiner before anything is grouped by them; what is grouped at the end
is a hash range of users, whose size `partition.shards` decides. Elements are batches until users
are known, so that per-element costs are paid per user and not per image.
"""

from __future__ import annotations

import functools
import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import apache_beam as beam
from apache_beam.pvalue import PCollection, TaggedOutput
from apache_beam.transforms.window import GlobalWindows

from components.fedemb.config import RunConfig, SourceConfig
from components.fedemb.pixels import BadImageError, decode_image
from components.fedemb.records import UserRecord, encode_user
from components.fedemb.sources import Batch, Part, image_files, read_part, source_format
from components.partition_users import shards
from components.partition_users.assignment import Assigner
from components.partition_users.hashing import Hasher, KeyRef, shard_of
from components.partition_users.prepare import Preparer, UserPart, merge, new_part
from components.partition_users.tombstones import read_tombstones


@dataclass(frozen=True)
class Job:
    """What all workers know: configuration and addresses, no key and no data."""

    config: RunConfig
    keys: KeyRef
    root: str
    """Private address of the run."""
    blocks: frozenset[str] | None
    """Ledger blocks whose users may train; None: all."""
    has_public_set: bool = False


def columns_of(config: RunConfig) -> list[str]:
    """Columns the private source must have, besides the image."""
    columns = config.data.source.columns
    named = [columns.user_id, columns.label, columns.cohort, columns.subgroup]
    if config.partition.evaluation.by == "value":
        named.append(config.partition.evaluation.column)
    return list(dict.fromkeys(name for name in named if name))


def read_batches(
    pipeline: beam.Pipeline, source: SourceConfig, parts: list[Part], columns: list[str], name: str
) -> PCollection:
    """Batches of a source, as `(images, columns)`, spread over the workers."""
    listed = pipeline | f"{name}Parts" >> beam.Create(parts, reshuffle=True)
    if source_format(source) == "tfrecord":
        from components.partition_users.tfrecords import read_tfrecords

        batches = listed | f"{name}ReadTFRecord" >> read_tfrecords(source, columns)
    else:
        batches = listed | f"{name}Read" >> beam.ParDo(_Read(source, columns))
    return batches | f"{name}Spread" >> beam.Reshuffle()


class _Read(beam.DoFn):
    """Part -> batches."""

    def __init__(self, source: SourceConfig, columns: list[str]):
        self._source, self._columns = source, columns

    def process(self, part: Part) -> Iterator[tuple[list[Any], dict[str, list[Any]]]]:
        for batch in read_part(self._source, part, self._columns):
            yield batch.images, batch.columns


class _Prepare(beam.DoFn):
    """Batch -> (user key, part of the user); rejects and counts aside."""

    def __init__(self, job: Job):
        self._job = job

    def setup(self) -> None:
        job = self._job
        known = (
            shards.PublicSet(job.root, job.config.partition.shards) if job.has_public_set else ()
        )
        self._preparer = Preparer(
            job.config,
            job.keys.hasher(),
            job.blocks,
            known.__contains__,
            read_tombstones(job.config.storage.tombstones),
        )

    def process(self, batch: tuple[list[Any], dict[str, list[Any]]]) -> Iterator[Any]:
        prepared = self._preparer.prepare(Batch(*batch))
        yield from prepared.parts.items()
        yield TaggedOutput("counts", (0, dict(prepared.counts)))
        for reject in prepared.rejects:
            yield TaggedOutput("rejects", reject)


class MergeUser(beam.CombineFn):
    """Joins the parts of a user, at most `cap` images a side at any time."""

    def __init__(self, cap: int):
        self._cap = cap

    def create_accumulator(self) -> UserPart:
        """A user of whom nothing is known."""
        return new_part()

    def add_input(self, accumulator: UserPart, part: UserPart) -> UserPart:
        """Joins one more part."""
        return merge(accumulator, part, self._cap)

    def merge_accumulators(self, accumulators: Iterable[UserPart]) -> UserPart:
        """Joins parts from several workers."""
        return functools.reduce(self.add_input, accumulators)

    def extract_output(self, accumulator: UserPart) -> UserPart:
        """The user as known in the end."""
        return accumulator


class _Finish(beam.DoFn):
    """(user key, whole user) -> ((folder, shard), row); duplicates and counts aside."""

    def __init__(self, job: Job):
        self._job = job

    def setup(self) -> None:
        job = self._job
        self._assigner = Assigner(job.config, job.keys.hasher(), job.blocks)

    def start_bundle(self) -> None:
        self._counts: Counter[str] = Counter()

    def process(self, element: tuple[bytes, UserPart]) -> Iterator[Any]:
        user_key, (cohort, subgroup, train, held_out, trained, held) = element
        config, counts = self._job.config, self._counts
        images, came, kind = train, trained, shards.USERS
        if held_out:  # the whole user is held out, whatever else they own
            counts["dropped_cross_split"] += trained
            images, came, kind = held_out, held, shards.EVALUATION
        if not images:
            return
        if cohort is not None and cohort not in config.partition.cohorts:
            counts["dropped_other_cohort"] += came
            return
        if kind == shards.USERS and not self._assigner.may_train(user_key, cohort):
            counts["dropped_block_not_reserved"] += came
            return
        ordered = sorted(images.items())
        size = len(ordered)
        copies = sum(count for _, (_, count, _) in ordered)
        counts["duplicate"] += copies - size
        counts["dropped_over_cap"] += came - copies
        counts[f"{kind}_images"] += size
        counts[f"{kind}_users"] += 1
        counts[f"{kind}_users_up_to_{1 << (size - 1).bit_length()}_images"] += 1
        record = UserRecord(
            user_key=int.from_bytes(user_key, "big"),
            images=tuple(png for _, (_, _, png) in ordered),
            labels=tuple(label for _, (label, _, _) in ordered),
            subgroup=subgroup or "",
            block=self._assigner.block(user_key, cohort),
        )
        shard = shard_of(user_key, config.partition.shards)
        yield (kind, shard), (user_key, size, encode_user(record))
        if copies > size:
            for digest, (label, count, _) in ordered:
                reject = ("duplicate", user_key.hex(), str(label), digest.hex())
                yield from [TaggedOutput("rejects", reject)] * (count - 1)

    def finish_bundle(self) -> Any:
        yield TaggedOutput("counts", GlobalWindows.windowed_value((0, dict(self._counts))))


class _WriteShard(beam.DoFn):
    """((folder, shard), rows) -> nothing; idempotent."""

    def __init__(self, job: Job):
        self._job = job

    def setup(self) -> None:
        self._hasher: Hasher = self._job.keys.hasher()

    def process(self, element: tuple[tuple[str, int], Iterable[Any]]) -> None:
        (kind, shard), rows = element
        users = [row for row in rows if row is not None]
        job = self._job
        shards.write_shard(
            job.root, kind, shard, rows=users, hasher=self._hasher, config=job.config
        )


def _sum(counts: Iterable[dict[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for count in counts:
        total.update(count)
    return dict(total)


def _three_ways(collection: PCollection, name: str, function: beam.DoFn) -> Any:
    """Applies a DoFn and returns its main output, counts and rejects."""
    every: Any = beam.ParDo(function).with_outputs("counts", "rejects", main="main")
    split: Any = collection | name >> every
    return split["main"], split["counts"], split["rejects"]


def build(pipeline: beam.Pipeline, job: Job, parts: list[Part]) -> None:
    """Adds the partition of the private images to a pipeline."""
    root, number = job.root, job.config.partition.shards
    source = job.config.data.source
    batches = read_batches(pipeline, source, parts, columns_of(job.config), "")
    users, counts, rejects = _three_ways(batches, "Prepare", _Prepare(job))
    cap = MergeUser(job.config.partition.max_images_per_user)
    capped = users | "CapPerUser" >> beam.CombinePerKey(cap)
    rows, more_counts, more_rejects = _three_ways(capped, "Finish", _Finish(job))
    every = [((kind, n), None) for kind in (shards.USERS, shards.EVALUATION) for n in range(number)]
    empty = pipeline | "EveryShard" >> beam.Create(every, reshuffle=False)
    _ = (
        (rows, empty)
        | "Rows" >> beam.Flatten()
        | "ByShard" >> beam.GroupByKey()
        | "WriteShards" >> beam.ParDo(_WriteShard(job))
    )
    _ = (
        (counts, more_counts)
        | "Counts" >> beam.Flatten()
        | "Sum" >> beam.CombinePerKey(_sum)
        | "WriteCounts" >> beam.MapTuple(lambda _, counts: shards.write_counts(root, counts))
    )
    _ = (
        (rejects, more_rejects)
        | "Rejects" >> beam.Flatten()
        | "RejectShard" >> beam.Map(lambda row: (hash_range(row, number), row))
        | "ByRejectShard" >> beam.GroupByKey()
        | "WriteRejects"
        >> beam.MapTuple(lambda shard, rows: shards.write_rejects(root, shard, number, rows))
    )


def hash_range(row: tuple[str, ...], number: int) -> int:
    """Shard of a reject: any fixed function of its content."""
    return shard_of(hashlib.sha256("\0".join(row).encode(errors="replace")).digest(), number)


class _Digest(beam.DoFn):
    """Public batch -> (shard, first bytes of the digest)."""

    def __init__(self, job: Job, source: SourceConfig):
        self._job, self._source = job, source

    def setup(self) -> None:
        self._hasher = self._job.keys.hasher()
        self._files = image_files(self._source)

    def process(self, batch: tuple[list[Any], dict[str, list[Any]]]) -> Iterator[tuple[int, bytes]]:
        config = self._job.config
        size, channels = config.model.image_size, config.model.channels
        for image in batch[0]:
            try:
                data = self._files.read(image) if self._files else image
                pixels = decode_image(data, size, channels, config.data.max_pixels)
            except BadImageError:
                continue
            digest = self._hasher.image_digest(pixels)
            yield shard_of(digest, config.partition.shards), digest[:8]


def build_public(
    pipeline: beam.Pipeline, job: Job, source: SourceConfig, parts: list[Part]
) -> None:
    """Adds the digests of the public images to a pipeline: sorted ranges in the work folder."""
    root, number = job.root, job.config.partition.shards
    empty = pipeline | "EveryRange" >> beam.Create(
        [(shard, b"") for shard in range(number)], reshuffle=False
    )
    digests = read_batches(pipeline, source, parts, [], "Public") | "Digest" >> beam.ParDo(
        _Digest(job, source)
    )
    _ = (
        (digests, empty)
        | "Digests" >> beam.Flatten()
        | "ByRange" >> beam.GroupByKey()
        | "WriteDigests"
        >> beam.MapTuple(
            lambda shard, found: shards.write_public_digests(root, shard, filter(None, found))
        )
    )
