"""Exports a released model to ONNX, TFLite or `.keras`, from pixels to outputs.

Every export is loaded and compared with the SavedModel on photos in all encodings; an export with
different outputs is not written.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedemb.data.hostile_photos import hostile_photos
from fedemb.errors import InputError, Refused
from fedemb.foundation.extras import missing_extra
from fedemb.foundation.files import write_bytes
from fedemb.models.loading import load_backbone
from fedemb.serving.released import ReleasedModel

Embedder = Callable[[np.ndarray], np.ndarray]
"""Function from uint8 [n, size, size, channels] to float32 [n, dim]."""
_FURTHEST = 1e-4
"""Maximum difference between an export's output and the SavedModel's; float32 rounding."""
_OPERATORS = 17
"""ONNX operator set, supported by runtimes of recent years."""


def export(model: ReleasedModel, form: str, folder: Path) -> Path:
    """Writes a released model as `model.<form>`; `form` is one of `FORMS`.

    Raises:
      InputError: the format is unknown.
      ConfigError: the converter is not installed.
      Refused: the outputs of the export differ from the SavedModel's.
    """
    if form not in FORMS:
        raise InputError(f"unsupported export format {form!r}; use one of {', '.join(FORMS)}")
    make, run = FORMS[form]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # converters warn of what a user cannot change
            data = make(model)
            found = run(data)(_pixels(model))
    except ModuleNotFoundError as error:
        raise (missing_extra(error) or error) from error
    distance = float(np.abs(found - model.embed(_pixels(model))).max())
    if not distance <= _FURTHEST:
        raise Refused(
            f"{model.output} of the export to {form} differ by {distance:.2g} from those of the "
            f"SavedModel, expected at most {_FURTHEST:g}. The file was not written. Use another "
            "format"
        )
    path = folder / f"model.{form}"
    write_bytes(path, data)
    return path


def _pixels(model: ReleasedModel) -> np.ndarray:
    return np.stack([model.reader.read(photo.data) for photo in hostile_photos()])


def _onnx(model: ReleasedModel) -> bytes:
    import tensorflow as tf
    import tf2onnx

    shape = [None, model.reader.image_size, model.reader.image_size, model.reader.channels]
    traced = tf.function(lambda images: model.signature(images=images)[model.output])
    spec = [tf.TensorSpec(shape, tf.uint8, name="images")]
    converted, _ = tf2onnx.convert.from_function(traced, input_signature=spec, opset=_OPERATORS)
    return converted.SerializeToString()


def _run_onnx(data: bytes) -> Embedder:
    import onnxruntime

    session = onnxruntime.InferenceSession(data)
    name = session.get_inputs()[0].name
    return lambda pixels: np.asarray(session.run(None, {name: pixels})[0])


def _tflite(model: ReleasedModel) -> bytes:
    import tensorflow as tf

    folder = str(model.bundle / "saved_model")
    return tf.lite.TFLiteConverter.from_saved_model(folder).convert()


def _run_tflite(data: bytes) -> Embedder:
    import tensorflow as tf

    run = tf.lite.Interpreter(model_content=data).get_signature_runner("serving_default")
    (name,) = run.get_output_details()
    return lambda pixels: run(images=pixels)[name]


def _keras(model: ReleasedModel) -> bytes:
    import keras

    backbone = load_backbone(model.bundle / "backbone.keras", model.config.model)
    shape = (model.reader.image_size, model.reader.image_size, model.reader.channels)
    pixels = keras.Input(shape, dtype="uint8", name="images")
    scaled = keras.layers.Rescaling(1 / 128, offset=-1, name="preprocess")(pixels)
    end = keras.layers.Softmax if model.config.model.classes else keras.layers.UnitNormalization
    outputs = end(name=model.output)(backbone(scaled))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.keras")
        keras.Model(pixels, outputs).save(path)
        return path.read_bytes()


def _run_keras(data: bytes) -> Embedder:
    import keras

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.keras")
        path.write_bytes(data)
        loaded: Any = keras.saving.load_model(path, compile=False, safe_mode=True)
    return lambda pixels: np.asarray(loaded(pixels, training=False))


FORMS: Mapping[str, tuple[Callable[[ReleasedModel], bytes], Callable[[bytes], Embedder]]] = {
    "onnx": (_onnx, _run_onnx),
    "tflite": (_tflite, _run_tflite),
    "keras": (_keras, _run_keras),
}
"""Converter and runtime of each format."""
