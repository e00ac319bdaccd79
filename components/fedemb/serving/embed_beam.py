"""Embeds a large set of photos on workers of a Beam engine, which load the verified model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import apache_beam as beam
from apache_beam.io.parquetio import WriteToParquet
from apache_beam.ml.inference.base import ModelHandler, PredictionResult, RunInference

from fedemb.data.beam_engine import run_on_beam
from fedemb.errors import Refused
from fedemb.foundation.canonical_json import tree_digests
from fedemb.serving.photo_rows import Pixels, decoded, rows, schema
from fedemb.serving.photo_source import PhotoSource
from fedemb.serving.released import ReleasedModel
from fedemb.storage import join, local_tree, open_store, put_tree

_COUNTS = "counts.json"


def embed_on_beam(
    source: PhotoSource, model: ReleasedModel, output: str, options: Sequence[str]
) -> tuple[int, int]:
    """Embeds every photo; all workers must reach photos and output.

    Returns:
      The numbers of rows and of rows without an embedding.
    """
    prefix = output.removesuffix(".parquet")
    work = f"{prefix}.work"
    put_tree(model.bundle, join(work, "model"))
    handler = _Released(join(work, "model"), tree_digests(model.bundle))
    reader, form = model.reader, schema(model)

    def build(pipeline: Any) -> None:
        found = (
            pipeline
            | "Start" >> beam.Impulse()
            | "List" >> beam.FlatMap(lambda _: source.units())
            | "Spread" >> beam.Reshuffle()
            | "Read" >> beam.FlatMap(lambda unit: decoded(source.photos(unit), reader))
            | "Embed" >> RunInference(handler)
            | "Rows" >> beam.FlatMap(lambda result: result.inference)
        )
        _ = found | "Write" >> WriteToParquet(prefix, form, file_name_suffix=".parquet")
        _ = (
            found
            | "Outcome" >> beam.Map(lambda row: "bad" if row["reason"] else "good")
            | "Count" >> beam.combiners.Count.PerElement()
            | "Collect" >> beam.combiners.ToDict()
            | "Store" >> beam.Map(_store_counts, work)
        )

    store = open_store(work)
    try:
        run_on_beam(build, options, "embedding photos")
        counts = json.loads(store.read(_COUNTS))
    finally:
        for name in [*store.list(), "model.tree"]:
            store.delete(name)
        if store.local_root is not None:
            shutil.rmtree(store.local_root, ignore_errors=True)
    return sum(counts.values()), counts.get("bad", 0)


def _store_counts(counts: Mapping[str, int], uri: str) -> None:
    open_store(uri).write(_COUNTS, json.dumps(counts).encode())


class _Released(ModelHandler[Pixels, PredictionResult, ReleasedModel]):
    """Loads the model for RunInference; an element is a batch of photos."""

    def __init__(self, uri: str, digests: Mapping[str, str]):
        self._uri, self._digests = uri, dict(digests)

    def load_model(self) -> ReleasedModel:
        with local_tree(self._uri) as bundle:
            if tree_digests(bundle) != self._digests:
                raise Refused(
                    f"the copy of the model at {self._uri} is not the one that was verified; "
                    "remove it, and embed again"
                )
            model = ReleasedModel(bundle)
            model.check_parity()
        return model

    def run_inference(
        self,
        batch: Sequence[Pixels],
        model: ReleasedModel,
        inference_args: dict[str, Any] | None = None,
    ) -> Iterator[PredictionResult]:
        del inference_args
        for pixels in batch:
            table = rows(model, pixels, model.embed(pixels.images))
            yield PredictionResult(pixels.names, table.to_pylist())

    def get_num_bytes(self, batch: Sequence[Pixels]) -> int:
        return sum(pixels.images.nbytes for pixels in batch)

    def batch_elements_kwargs(self) -> Mapping[str, Any]:
        return {"min_batch_size": 1, "max_batch_size": 1}
