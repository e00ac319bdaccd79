"""Reading a source with Beam: the graph names files, and workers find what is in them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import apache_beam as beam
from apache_beam.pvalue import PValue

from fedemb.config import RunConfig, SourceConfig
from fedemb.data.hashing import KeyRef
from fedemb.data.sources import Part, read_part, split_part
from fedemb.partition.shards import Place


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
        from fedemb.partition.tfrecords import read_tfrecords

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
