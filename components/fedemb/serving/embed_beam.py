"""Embeds a large set of photos on workers of a Beam engine.

A worker reads a part, embeds it with RunInference and stores it before it takes the next part.
After a stop, the next run resumes. Workers load the verified model from a copy next to the parts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import apache_beam as beam
from apache_beam.ml.inference.base import ModelHandler, PredictionResult, RunInference
from apache_beam.pvalue import TaggedOutput

from fedemb.data.beam_engine import run_on_beam
from fedemb.data.photos import PhotoReader
from fedemb.errors import Refused
from fedemb.foundation.digests import tree_digests
from fedemb.serving.photo_parts import Done, KeptParts, PhotoSource, Pixels, Unit
from fedemb.serving.released import ReleasedModel
from fedemb.storage import join, local_tree, open_store, put_tree

_DONE = "done.json"


def embed_on_beam(
    source: PhotoSource, kept: KeptParts, model: ReleasedModel, options: Sequence[str]
) -> list[Done]:
    """Embeds every part that is not stored yet; all workers must reach photos and stored parts."""
    copy = join(kept.uri, f"model-{model.space_id}")
    put_tree(model.bundle, copy)
    handler = _Released(copy, tree_digests(model.bundle))

    def build(pipeline: Any) -> None:
        read = beam.ParDo(_Read(source, kept, model.reader))
        parts = (
            pipeline
            | "Start" >> beam.Impulse()
            | "List" >> beam.FlatMap(lambda _: source.units())
            | "Spread" >> beam.Reshuffle()
            | "Read" >> read.with_outputs("kept", main="new")
        )
        embedded = (
            parts.new
            | "Embed" >> RunInference(handler)
            | "Keep" >> beam.Map(lambda found: kept.write(found.example, found.inference))
        )
        _ = (
            (embedded, parts.kept)
            | "All" >> beam.Flatten()
            | "Listed" >> beam.combiners.ToList()
            | "Say" >> beam.Map(_say, kept.uri)
        )

    run_on_beam(build, options, "embedding photos")
    return [Done(**part) for part in json.loads(open_store(kept.uri).read(_DONE))]


def _say(parts: Sequence[Done], uri: str) -> None:
    open_store(uri).write(_DONE, json.dumps([asdict(part) for part in parts]).encode())


class _Read(beam.DoFn):
    """Maps a unit to parts to embed and parts that are already stored."""

    def __init__(self, source: PhotoSource, kept: KeptParts, reader: PhotoReader):
        self._source, self._kept, self._reader = source, kept, reader

    def process(self, unit: Unit) -> Iterator[Any]:
        for name, photos in self._source.parts(unit):
            part = self._kept.find(name, photos)
            if part is None:
                yield Pixels.read(name, photos, self._reader)
            else:
                yield TaggedOutput("kept", part)


class _Released(ModelHandler[Pixels, PredictionResult, ReleasedModel]):
    """Loads the model for RunInference; a batch is one part."""

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
        for part in batch:
            yield PredictionResult(part, model.embed(part.images))

    def get_num_bytes(self, batch: Sequence[Pixels]) -> int:
        return sum(part.images.nbytes for part in batch)

    def batch_elements_kwargs(self) -> Mapping[str, Any]:
        return {"min_batch_size": 1, "max_batch_size": 1}
