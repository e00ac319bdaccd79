"""The digests of the public images: a pass of its own writes sorted ranges, workers map them."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import apache_beam as beam
import numpy as np

from fedemb.config import SourceConfig
from fedemb.data.hashing import shard_of
from fedemb.data.photos import PhotoReader
from fedemb.data.sources import Part, image_files
from fedemb.partition.prepare import image_digests
from fedemb.partition.reading import Job, read_batches
from fedemb.partition.shards import WORK, Place
from fedemb.storage import Store, open_store


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
        path.write_bytes(store.read(name))
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
        reader = PhotoReader.of(config.model, config.data.max_pixels)
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
