"""The Beam graph: read, prepare, cap per user, shard, write. Deterministic and idempotent.

Its shape is what makes it scale (asserted in tests on the graph): nothing of data size is a side
input; users are capped by a combiner before anything is grouped by them; what is grouped at the end
is a hash range of users, whose size `partition.shards` decides. Elements are batches until users
are known, so that per-element costs are paid per user and not per image.

Reading a source with Beam: the graph names files, and workers find what is in them.

TFRecord files of tf.train.Example, through tfx-bsl's TFXIO into Arrow record batches.

The columnar decoder stops at a feature that changes its type from record to record, and data must
never stop the step. So each record is first parsed leniently and its few named features are written
again as bytes; what is not an Example becomes an empty one, and is dropped and counted like any
record without an image.

The digests of the public images: a pass of its own writes sorted ranges, workers map them.
"""

from __future__ import annotations

import functools
import hashlib
import io
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import apache_beam as beam
import numpy as np
from apache_beam.pvalue import PCollection, PValue, TaggedOutput
from apache_beam.transforms.window import GlobalWindows

from fedemb.config import RunConfig, SourceConfig
from fedemb.data.client_data import group_files, split_groups
from fedemb.data.identity import KEY_BYTES, Cell, Hasher, KeyRef, name_text, shard_of
from fedemb.data.photos import PhotoReader
from fedemb.data.pixels import canonical_image
from fedemb.data.records import UserRecord, encode_example, encode_user, example_values
from fedemb.data.sources import (
    Batch,
    Part,
    apply_where,
    image_files,
    named_labels,
    passing,
    read_part,
    split_part,
)
from fedemb.data.tables import iter_tfrecord
from fedemb.partition import shards
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
from fedemb.partition.shards import WORK, Place
from fedemb.storage import LARGEST, Store, open_store


@dataclass(frozen=True)
class Job:
    """Configuration and addresses that all workers have; no key and no data."""

    config: RunConfig
    keys: KeyRef
    place: Place
    """Where the run's private folders are."""
    blocks: frozenset[str] | None
    """Ledger blocks whose users may train; None: all."""
    has_public_set: bool = False
    spread: bool = False
    """Whether there are workers to spread the batches over."""
    spill: str = ""
    """File for the images, see `shards.Spill`; empty: they travel through the engine."""


def read_batches(
    pipeline: beam.Pipeline,
    source: SourceConfig,
    parts: list[Part],
    columns: list[str],
    name: str,
    *,
    spread: bool,
) -> PValue:
    """Batches of a source, as `(images, columns)`.

    The graph names files; row groups and folders of users are found by workers. `name` starts the
    names of the transforms. With `spread`, batches are distributed over all workers; in one process
    that would only hold all files in memory.
    """
    listed = (
        pipeline
        | f"{name}Files" >> beam.Create(parts, reshuffle=False)
        | f"{name}Split" >> beam.FlatMap(split_part)
        | f"{name}Parts" >> beam.Reshuffle()
    )
    if source.file_format == "tfrecord":
        batches = listed | f"{name}ReadTFRecord" >> read_tfrecords(source, columns)
    else:
        batches = listed | f"{name}Read" >> beam.ParDo(_Read(source, columns))
    return batches | f"{name}Spread" >> beam.Reshuffle() if spread else batches


class _Read(beam.DoFn):
    """Part -> batches."""

    def __init__(self, source: SourceConfig, columns: list[str]):
        self._source, self._columns = source, columns

    def process(self, part: Part) -> Iterator[tuple[list[Any], dict[str, list[Any]]]]:
        for batch in read_part(self._source, part, self._columns):
            yield [*batch.images], {name: [*values] for name, values in batch.columns.items()}


ROWS = 256


class _Records(beam.DoFn):
    """Part -> serialised Examples with the named features only, all of them bytes."""

    def __init__(self, source: SourceConfig, columns: list[str]):
        self._image, self._columns = source.columns.image, columns
        self._passing = passing(source)

    def process(self, part: Part) -> Iterator[bytes]:
        for record in iter_tfrecord(part):
            values = example_values(record, [self._image, *self._columns]) or self._passing
            features = {
                name: [data]
                for name in self._columns
                if (data := _as_bytes(values.get(name))) is not None
            }
            if isinstance(image := values.get(self._image), bytes):
                features[self._image] = [image]
            yield encode_example(features)


def _as_bytes(value: Cell) -> bytes | None:
    """A value as bytes that are read as the value is."""
    if isinstance(value, bytes) or value is None:
        return value
    text = name_text(value)
    return (f"{value:e}" if text is None and isinstance(value, float) else text or "").encode()


def _to_batch(record_batch: Any, source: SourceConfig, columns: list[str]) -> Iterator[Any]:
    names = record_batch.schema.names

    def first(name: str) -> list[bytes | None]:
        if name not in names:
            return [None] * record_batch.num_rows
        values = record_batch.column(names.index(name)).to_pylist()
        return [value[0] if value else None for value in values]

    batch = Batch(first(source.columns.image), {name: first(name) for name in columns})
    kept = apply_where(source, named_labels(source, batch))
    if len(kept):
        yield kept.images, kept.columns


@beam.ptransform_fn
def read_tfrecords(parts: PCollection[Part], source: SourceConfig, columns: list[str]) -> PValue:
    """Reads parts of TFRecord files into `(images, columns)` batches."""
    from tensorflow_metadata.proto.v0 import schema_pb2 as generated
    from tfx_bsl.public import tfxio

    wanted = list(dict.fromkeys([*columns, *source.where]))
    schema_pb2: Any = generated  # made at run time, so that type checkers see nothing of it
    schema = schema_pb2.Schema()
    for name in dict.fromkeys([source.columns.image, *wanted]):
        schema.feature.add(name=name, type=schema_pb2.BYTES)
    records = tfxio.TFExampleBeamRecord(
        physical_format="tfrecord", telemetry_descriptors=["fedemb"], schema=schema
    )
    return (
        parts
        | "Records" >> beam.ParDo(_Records(source, wanted)).with_output_types(bytes)
        | "Decode" >> records.BeamSource(batch_size=ROWS)
        | "Batches" >> beam.FlatMap(_to_batch, source, wanted)
    )


def write_public_digests(place: Place, shard: int, digests: Iterable[bytes]) -> None:
    """Writes a sorted range of the digests of public images, as an array to be mapped."""
    sink = io.BytesIO()
    np.save(sink, np.frombuffer(b"".join(sorted(set(digests))), ">u8").astype(np.uint64))
    place.store.write(f"{WORK}/public-{shard:05d}.npy", sink.getvalue())


class PublicSet:
    """Digests of the public images, in files mapped into memory: a lookup touches a few pages."""

    def __init__(self, root: str, shards: int):
        """Opens the files below `root`; remote ones are copied to a temporary folder first."""
        store = open_store(root)
        self._copies = tempfile.TemporaryDirectory(prefix="fedemb-")
        self._shards = shards
        names = [f"{WORK}/public-{shard:05d}.npy" for shard in range(shards)]
        self._ranges = [np.load(self._local(store, name), mmap_mode="r") for name in names]

    def _local(self, store: Store, name: str) -> Path:
        if store.local_root is not None:
            return store.local_root / name
        path = Path(self._copies.name, Path(name).name)
        path.write_bytes(store.read(name, LARGEST))
        return path

    def __contains__(self, digest: bytes) -> bool:
        """Whether an image with this digest is public. By 64 bits: a false hit drops one image."""
        word = int.from_bytes(digest[:8], "big")
        values = self._ranges[word * self._shards >> 64]
        place = int(np.searchsorted(values, np.uint64(word)))
        return place < len(values) and int(values[place]) == word


class _Digest(beam.DoFn):
    """Public batch -> (shard, first bytes of the digest)."""

    def __init__(self, job: Job, source: SourceConfig):
        self._job, self._source = job, source

    def setup(self) -> None:
        self._hasher = self._job.keys.hasher()
        self._files = image_files(self._source)

    def process(self, batch: tuple[list[Any], dict[str, list[Any]]]) -> Iterator[tuple[int, bytes]]:
        config = self._job.config
        reader = PhotoReader(*config.model.photo)
        for digest in image_digests(batch[0], self._files, reader, self._hasher):
            yield shard_of(digest, config.partition.shards), digest[:8]


def build_public(
    pipeline: beam.Pipeline, job: Job, source: SourceConfig, parts: list[Part]
) -> None:
    """Adds the digests of the public images to a pipeline: sorted ranges in the work folder."""
    place, number = job.place, job.config.partition.shards
    empty = (
        pipeline
        | "DigestStart" >> beam.Impulse()
        | "EveryDigestRange" >> beam.FlatMap(lambda _: ((shard, b"") for shard in range(number)))
    )
    batches = read_batches(pipeline, source, parts, [], "Public", spread=job.spread)
    digests = batches | "Digest" >> beam.ParDo(_Digest(job, source))
    _ = (
        (digests, empty)
        | "Digests" >> beam.Flatten()
        | "ByRange" >> beam.GroupByKey()
        | "WriteDigests"
        >> beam.MapTuple(
            lambda shard, found: write_public_digests(place, shard, filter(None, found))
        )
    )


class _Prepare(beam.DoFn):
    """Batch -> (user key, part of the user); rejects and counts aside."""

    def __init__(self, job: Job):
        self._job = job

    def setup(self) -> None:
        job = self._job
        known = PublicSet(job.place.root, job.config.partition.shards) if job.has_public_set else ()
        self._preparer = Preparer(
            job.config, job.keys.hasher(), job.blocks, known.__contains__, image=self._kept
        )
        self._spill = shards.Spill(job.spill)

    def _kept(self, data: Cell, reader: PhotoReader) -> tuple[np.ndarray, bytes]:
        pixels, png = canonical_image(data, reader)
        return pixels, self._spill.put(png)

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
            images=tuple(token for _, (_, _, token) in ordered),
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
        self._spill = shards.Spill(self._job.spill)

    def process(self, element: tuple[tuple[str, int], Iterable[Any]]) -> Iterator[Any]:
        (kind, shard), rows = element
        partition = self._job.config.partition
        files, keys = shards.write_shard(
            self._job.place,
            kind,
            shard,
            shards=partition.shards,
            rows=filter(None, rows),
            spill=self._spill,
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
