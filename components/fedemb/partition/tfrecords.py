"""TFRecord files of tf.train.Example, through tfx-bsl's TFXIO into Arrow record batches.

The columnar decoder stops at a feature that changes its type from record to record, and data must
never stop the step. So each record is first parsed leniently and its few named features are written
again as bytes; what is not an Example becomes an empty one, and is dropped and counted like any
record without an image.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import apache_beam as beam
from apache_beam.pvalue import PCollection, PValue

from fedemb.config import SourceConfig
from fedemb.data.formats.tfrecord_files import iter_tfrecord
from fedemb.data.identity import Cell, name_text
from fedemb.data.records import encode_example, example_values
from fedemb.data.sources import Batch, Part, apply_where, named_labels, passing

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
