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
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from typing import Any

import apache_beam as beam
from apache_beam.pvalue import PValue, TaggedOutput
from apache_beam.transforms.window import GlobalWindows

from fedemb.data.group_index import split_groups
from fedemb.data.hashing import KEY_BYTES, Hasher, shard_of
from fedemb.data.records import UserRecord, encode_user
from fedemb.data.sources import Batch, Part
from fedemb.data.user_layout import group_files
from fedemb.partition import shards
from fedemb.partition.assignment import Assigner, columns_of
from fedemb.partition.prepare import Preparer, UserPart, merge, new_part, settle
from fedemb.partition.public_set import PublicSet
from fedemb.partition.reading import Job, read_batches


class _Prepare(beam.DoFn):
    """Batch -> (user key, part of the user); rejects and counts aside."""

    def __init__(self, job: Job):
        self._job = job

    def setup(self) -> None:
        job = self._job
        known = PublicSet(job.place.root, job.config.partition.shards) if job.has_public_set else ()
        self._preparer = Preparer(
            job.config,
            job.keys.hasher(),
            job.blocks,
            known.__contains__,
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
        user_key, part = element
        config, counts = self._job.config, self._counts
        settled = settle(user_key, part, config.partition.cohorts, self._assigner, counts)
        if settled is None:
            return
        cohort, subgroup = part[:2]
        kind = shards.EVALUATION if settled.held_out else shards.USERS
        ordered, size = settled.images, len(settled.images)
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
        if settled.copies > size:
            for digest, (label, count, _) in ordered:
                reject = ("duplicate", user_key.hex(), str(label), digest.hex())
                yield from [TaggedOutput("rejects", reject)] * (count - 1)

    def finish_bundle(self) -> Any:
        yield TaggedOutput("counts", GlobalWindows.windowed_value((0, dict(self._counts))))


class _WriteShard(beam.DoFn):
    """((folder, shard), rows) -> files of it; aside, its users by files of groups. Idempotent."""

    def __init__(self, job: Job):
        self._job = job

    def setup(self) -> None:
        self._hasher: Hasher = self._job.keys.hasher()

    def process(self, element: tuple[tuple[str, int], Iterable[Any]]) -> Iterator[Any]:
        (kind, shard), rows = element
        partition = self._job.config.partition
        files, keys = shards.write_shard(
            self._job.place,
            kind,
            shard,
            shards=partition.shards,
            rows=(row for row in rows if row is not None),
        )
        for file in files:
            yield kind, file
        if kind == shards.USERS:
            names = [int(key).to_bytes(KEY_BYTES, "big") for key in keys]
            groups = self._hasher.groups(names, partition.groupings, partition.virtual_clients)
            for grouping, row in enumerate(groups):
                for part, piece in split_groups(shard, row):
                    yield TaggedOutput("groups", ((grouping, part), piece))


def _write_groups(element: tuple[tuple[int, int], Iterable[Any]], job: Job) -> tuple[str, Any]:
    """((grouping, range), users of it by shard) -> the file of them. Idempotent."""
    (grouping, part), pieces = element
    return shards.USERS, shards.write_groups(
        job.place,
        grouping,
        part,
        virtual_clients=job.config.partition.virtual_clients,
        pieces=(piece for piece in pieces if piece is not None),
    )


def _sum(counts: Iterable[dict[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for count in counts:
        total.update(count)
    return dict(total)


def _three_ways(collection: PValue, name: str, function: beam.DoFn) -> Any:
    """Applies a DoFn and returns its main output, counts and rejects."""
    every: Any = beam.ParDo(function).with_outputs("counts", "rejects", main="main")
    split: Any = collection | name >> every
    return split["main"], split["counts"], split["rejects"]


def build(pipeline: beam.Pipeline, job: Job, parts: list[Part]) -> None:
    """Adds the partition of the private images to a pipeline."""
    place, number = job.place, job.config.partition.shards
    source = job.config.data.source
    batches = read_batches(pipeline, source, parts, columns_of(job.config), "", spread=job.spread)
    users, counts, rejects = _three_ways(batches, "Prepare", _Prepare(job))
    cap = MergeUser(job.config.partition.max_images_per_user)
    capped = users | "CapPerUser" >> beam.CombinePerKey(cap)
    rows, more_counts, more_rejects = _three_ways(capped, "Finish", _Finish(job))
    files = _write_users(pipeline, rows, job)
    _ = (
        files
        | "ByFolder" >> beam.GroupByKey()
        | "WriteFiles" >> beam.MapTuple(lambda kind, files: shards.write_files(place, kind, files))
    )
    _ = (
        (counts, more_counts)
        | "Counts" >> beam.Flatten()
        | "Sum" >> beam.CombinePerKey(_sum)
        | "WriteCounts" >> beam.MapTuple(lambda _, counts: shards.write_counts(place, counts))
    )
    _ = (
        (rejects, more_rejects)
        | "Rejects" >> beam.Flatten()
        | "RejectTimes" >> beam.combiners.Count.PerElement()
        | "RejectShard" >> beam.Map(lambda row: (hash_range(row[0], number), row))
        | "ByRejectShard" >> beam.GroupByKey()
        | "WriteRejects"
        >> beam.MapTuple(lambda shard, rows: shards.write_rejects(place, shard, number, rows))
    )


def _keys(pipeline: beam.Pipeline, name: str, *axes: Sequence[Any]) -> PValue:
    """`(key, None)` of all keys that must exist whatever the data; a worker lists them."""
    started = pipeline | f"{name}Start" >> beam.Impulse()
    return started | name >> beam.FlatMap(lambda _: ((key, None) for key in product(*axes)))


def _write_users(pipeline: beam.Pipeline, rows: PValue, job: Job) -> PValue:
    """Writes users by shard and groups by range; gives `(folder, file)` for every file."""
    partition = job.config.partition
    ranges = group_files(partition.virtual_clients)
    kinds = (shards.USERS, shards.EVALUATION)
    all_shards = _keys(pipeline, "EveryShard", kinds, range(partition.shards))
    all_groups = _keys(pipeline, "EveryRange", range(partition.groupings), range(ranges))
    writer: Any = beam.ParDo(_WriteShard(job)).with_outputs("groups", main="files")
    written: Any = (
        (rows, all_shards)
        | "Rows" >> beam.Flatten()
        | "ByShard" >> beam.GroupByKey()
        | "WriteShards" >> writer
    )
    groups = (
        (written["groups"], all_groups)
        | "Groups" >> beam.Flatten()
        | "ByGroups" >> beam.GroupByKey()
        | "WriteGroups" >> beam.Map(_write_groups, job)
    )
    return (written["files"], groups) | "Written" >> beam.Flatten()


def hash_range(row: tuple[str, ...], number: int) -> int:
    """Shard of a reject: any fixed function of its content."""
    return shard_of(hashlib.sha256("\0".join(row).encode(errors="replace")).digest(), number)
