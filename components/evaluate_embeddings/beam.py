"""The same embeddings by Beam over tfx-bsl RunInference: for sets that outgrow a machine.

Every backbone is exported as a frozen SavedModel that takes serialized `tf.train.Example`s, one per
image; workers read the user records, run inference in batches, and write Parquet. Runner and their
number are Beam's own options (`--runner=FlinkRunner`, `--direct_num_workers=0`, ...).
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedemb.config import ModelConfig, RunConfig
from fedemb.data.client_data import UserStore
from fedemb.data.pixels import decode_pngs
from fedemb.data.records import encode_example
from fedemb.evaluation.held_out import Subjects

_USERS_PER_TASK = 64


def export_for_inference(backbone: Any, model: ModelConfig, folder: Path) -> None:
    """Writes a SavedModel: serialized Examples with one feature `pixels` to unit embeddings."""
    import tensorflow as tf
    from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2

    from fedemb.embedding import preprocess

    feature = {"pixels": tf.io.FixedLenFeature([], tf.string)}
    shape = [-1, model.image_size, model.image_size, model.channels]

    examples_spec = tf.TensorSpec([None], tf.string, name="examples")

    def serve(examples: Any) -> Any:
        pixels = tf.io.parse_example(examples, feature)["pixels"]
        images = tf.reshape(tf.io.decode_raw(pixels, tf.uint8), shape)
        embeddings = backbone(preprocess(images), training=False)
        return tf.math.l2_normalize(tf.cast(embeddings, tf.float32), axis=1)

    # RunInference opens a TF1 session, which does not find Keras 3 variables: freeze them.
    traced: Any = tf.function(serve, input_signature=[examples_spec])
    frozen = convert_variables_to_constants_v2(traced.get_concrete_function())

    @tf.function(input_signature=[examples_spec])
    def serving(examples: Any) -> dict[str, Any]:
        return {"embedding": frozen(examples)[0]}

    tf.saved_model.save(tf.Module(), str(folder), signatures={"serving_default": serving})


def images_of(path: str, rows: Sequence[int], limits: Sequence[int]) -> Iterator[Any]:
    """Yields ((row, image), serialized Example) for every image of some users of a store."""
    store = UserStore(Path(path))
    for row, limit, user in zip(rows, limits, store.read(rows), strict=True):
        images = decode_pngs(user.images[:limit], store.image_size, store.channels)
        for place, image in enumerate(images):
            yield (row, place), encode_example({"pixels": [image.tobytes()]})


def to_row(element: Any) -> dict[str, Any]:
    """Turns a keyed prediction into a row of the Parquet file."""
    (row, place), log = element
    tensor = log.predict_log.response.outputs["embedding"]
    values = np.frombuffer(tensor.tensor_content, np.float32) if tensor.tensor_content else None
    values = np.array(tensor.float_val, np.float32) if values is None else values
    return {"row": row, "place": place, "embedding": values.tolist()}


def embed_users_beam(
    store: UserStore,
    backbones: Mapping[str, Any],
    config: RunConfig,
    pipeline_options: Sequence[str],
) -> tuple[Subjects, dict[str, np.ndarray]]:
    """Embeds the images of a store with every backbone; the same result as `embed.embed_users`.

    Args:
      store: evaluation users, in a folder the workers can read.
      backbones: by name.
      config: of the run.
      pipeline_options: flags of Beam.

    Returns:
      The subjects, and by name float32 [n, dim].
    """
    counts = store.image_counts.astype(np.int64)
    before = np.cumsum(counts) - counts
    limits = np.clip(config.evaluation.max_images - before, 0, counts)
    rows = np.flatnonzero(limits)
    tasks = [
        (rows[i : i + _USERS_PER_TASK].tolist(), limits[rows[i : i + _USERS_PER_TASK]].tolist())
        for i in range(0, len(rows), _USERS_PER_TASK)
    ]
    embeddings = {}
    with tempfile.TemporaryDirectory(prefix="fedemb-") as temporary:
        for name, backbone in backbones.items():
            folder = Path(temporary, name)
            export_for_inference(backbone, config.model, folder / "model")
            _run_pipeline(store.path, tasks, folder, config, pipeline_options)
            embeddings[name] = _read(folder, config.model.embedding_dim)
    users = [user for task, _ in tasks for user in store.read(task)]
    kept = limits[rows].tolist()
    subjects = Subjects(
        np.array(
            [label for user, n in zip(users, kept, strict=True) for label in user.labels[:n]],
            np.int64,
        ),
        np.repeat(np.array([user.user_key for user in users], np.uint64), kept),
        np.repeat(np.array([user.subgroup for user in users], str), kept),
    )
    return subjects, embeddings


def _run_pipeline(
    users: Path, tasks: list[Any], folder: Path, config: RunConfig, options: Sequence[str]
) -> None:
    import apache_beam as beam
    import pyarrow as pa
    from apache_beam.io.parquetio import WriteToParquet
    from apache_beam.options.pipeline_options import PipelineOptions
    from tfx_bsl.public.beam import RunInference
    from tfx_bsl.public.proto import model_spec_pb2

    specs: Any = model_spec_pb2  # generated: no types
    spec = specs.InferenceSpecType(
        saved_model_spec=specs.SavedModelSpec(
            model_path=str(folder / "model"), signature_name=["serving_default"]
        )
    )
    schema = pa.schema(
        [("row", pa.int64()), ("place", pa.int32()), ("embedding", pa.list_(pa.float32()))]
    )
    with beam.Pipeline(options=PipelineOptions(list(options))) as pipeline:
        _ = (
            pipeline
            | beam.Create(tasks)
            | beam.Reshuffle()
            | beam.FlatMapTuple(lambda rows, limits: images_of(str(users), rows, limits))
            | RunInference(spec)
            | beam.Map(to_row)
            | WriteToParquet(str(folder / "embeddings"), schema)
        )


def _read(folder: Path, dim: int) -> np.ndarray:
    """Embeddings in the order of (row, place), float32 [n, dim]."""
    import pyarrow.parquet as pq

    files = sorted(folder.glob("embeddings*"))
    if not files:
        return np.zeros((0, dim), np.float32)
    parts = [pq.read_table(file) for file in files]
    keys = np.concatenate(
        [np.stack([part["row"].to_numpy(), part["place"].to_numpy()], 1) for part in parts]
    )
    values = np.concatenate(
        [part["embedding"].combine_chunks().flatten().to_numpy().reshape(-1, dim) for part in parts]
    )
    return values[np.lexsort((keys[:, 1], keys[:, 0]))]
