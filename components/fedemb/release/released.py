"""A released model for its users: photo files in, embeddings out, from the bundle only.

`PARITY` contains photos in every encoding, and the embedding that training computed for each. An
installation that decodes photos differently from training, by another library or version, is
detected before it is used.

The model for TensorFlow Serving: pixels in, embeddings or probabilities out.
"""

from __future__ import annotations

import base64
import json
import re
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from jaxtyping import Float32, UInt8

from fedemb.config import ModelConfig, RunConfig
from fedemb.data import photos
from fedemb.data.hostile_photos import hostile_photos
from fedemb.data.photos import PhotoReader
from fedemb.data.pixels import canonical_image, decode_pngs
from fedemb.documents.utility import embedding_space_id
from fedemb.errors import ArtifactError, Refused
from fedemb.foundation.canonical_json import canonical_json, file_digest, sha256_hex
from fedemb.foundation.files import read_regular, write_bytes
from fedemb.models.backbone_files import load_backbone
from fedemb.models.inference import classify, embed
from fedemb.models.keras_backend import Model, Variable, all_layers
from fedemb.release.bundle import PARITY, SAVED_MODEL, SAVED_MODEL_FILES

_REMEDY = "Install the versions in requirements/"
_FURTHEST = 0.02
"""Maximum distance between two embeddings of one photo, of unit length. Another decoder version may
round differently; a rotated or tinted photo is ten times as far."""
_BATCH = 64


class ReleasedModel:
    """A bundle, its configuration and its network.

    The network is built from the configuration and the weights of `backbone.keras`, without custom
    code. The SavedModel is for other servers: its graph can read and write files, so it is never
    executed here.
    """

    def __init__(self, bundle: Path):
        """Opens a verified bundle.

        Raises:
          ArtifactError: the bundle has no model, or the model cannot be loaded.
        """
        file = bundle / "backbone.keras"
        try:
            self.config = RunConfig.model_validate(json.loads(read_regular(bundle / "config.json")))
            self.space_id = embedding_space_id(file_digest(file), self.config.model)
        except (OSError, ValueError) as error:
            raise ArtifactError(
                f"the model of {bundle} cannot be loaded ({type(error).__name__}); use a bundle "
                "that release_model published"
            ) from error
        self.backbone = load_backbone(file, self.config.model)
        self.bundle = bundle
        self.reader = PhotoReader(*self.config.model.photo)

    def embed(
        self, images: UInt8[np.ndarray, "images size size channels"]
    ) -> Float32[np.ndarray, "images dim"]:
        """Returns the outputs for pixels: rows of unit length, or a classifier's probabilities."""
        return (classify if self.config.model.classes else embed)(self.backbone, images, _BATCH)

    def check_parity(self) -> None:
        """Checks that this installation decodes and embeds photos as training did.

        Raises:
          Refused: results differ; the message names the encoding.
          ArtifactError: the bundle has no data to compare with.
        """
        require_parity(self.bundle / PARITY, self.reader.read, self.embed)


def write_parity(
    path: Path, compute: Callable[[np.ndarray], np.ndarray], reader: PhotoReader
) -> None:
    """Writes photos in every encoding with the embeddings that training and evaluation compute."""
    photos = list(hostile_photos())
    stored = [canonical_image(photo.data, reader)[1] for photo in photos]
    pixels = decode_pngs(stored, reader.image_size, reader.channels)
    embeddings = compute(pixels)
    lines = [
        {
            "name": photo.name,
            "file": base64.b64encode(photo.data).decode(),
            "pixels_sha256": sha256_hex(image.tobytes()),
            "embedding": [round(float(value), 6) for value in row],
        }
        for photo, image, row in zip(photos, pixels, embeddings, strict=True)
    ]
    write_bytes(path, canonical_json(lines))


def require_parity(
    path: Path,
    read: Callable[[bytes], np.ndarray],
    embedder: Callable[[np.ndarray], np.ndarray],
    *,
    exact: bool = False,
) -> None:
    """Reads and embeds the photos of a parity file, and compares the results with the file.

    Args:
      path: file written by `write_parity`.
      read: bytes to uint8 [size, size, channels].
      embedder: uint8 [images, size, size, channels] to rows of unit length.
      exact: whether every pixel must match too, as on the machine that wrote the file.

    Raises:
      Refused: a photo cannot be read, or its pixels or embedding differ.
      ArtifactError: the file is missing or damaged.
    """
    try:
        lines: Sequence[Mapping[str, Any]] = json.loads(read_regular(path))
        names = [line["name"] for line in lines]
        files = [base64.b64decode(line["file"]) for line in lines]
        wanted_pixels = {line["name"]: line["pixels_sha256"] for line in lines}
        wanted = np.array([line["embedding"] for line in lines], np.float32)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ArtifactError(f"{path.name} cannot be read; fetch the bundle again") from error
    if not names:
        raise ArtifactError(f"{path.name} holds no photo; fetch the bundle again")
    pixels = []
    for name, data in zip(names, files, strict=True):
        try:
            pixels.append(read(data))
        except Exception as error:
            raise Refused(f"test photo {name} cannot be decoded ({error}). {_REMEDY}") from error
        if exact and sha256_hex(pixels[-1].tobytes()) != wanted_pixels[name]:
            raise Refused(f"test photo {name} has other pixels than in training. {_REMEDY}")
    distance = np.linalg.norm(embedder(np.stack(pixels)) - wanted, axis=1)
    worst = int(np.argmax(np.where(np.isfinite(distance), distance, np.inf)))
    if not distance[worst] <= _FURTHEST:
        raise Refused(
            f"the embedding of test photo {names[worst]} is {distance[worst]:.3f} from that of "
            f"training, expected at most {_FURTHEST}. {_REMEDY}"
        )


Served = Callable[[np.ndarray], np.ndarray]
"""Pixels, uint8 `[n, size, size, channels]`, to rows, float32 `[n, dim]`."""
_LONGEST_NUMBER = 12
"""Maximum number of digits."""
_FUNCTION = re.compile(r"(__(?:inference|forward|backward)_[^\"\\]*?)_(\d+)(?=\")")
"""TensorFlow's function names, which contain a counter of the tracing process."""


def load_whitelisted(path: Path, start: Path, model: ModelConfig) -> Model:
    """Loads a backbone and checks that its tensors are exactly those of the public backbone.

    Raises:
      Refused: a tensor is missing, extra, or has another shape, or a frozen one has other values.
    """
    from fedemb.models.backbone_files import load_backbone

    backbone, initial = load_backbone(path, model), load_backbone(start, model)
    allowed = {_variable(item) for item in initial.weights}
    found = {_variable(item) for item in backbone.weights}
    if found != allowed:
        names = sorted(name for name, _ in found ^ allowed)
        raise Refused(
            f"the model holds other tensors than the backbone it started from: {', '.join(names)}; "
            "save the backbone alone, without head or optimizer"
        )
    if changed := _changed_constants(backbone, initial, model.trainable):
        raise Refused(
            f"the model has other values than its public backbone in tensors that private training "
            f"must not change: {', '.join(changed[:3])}. Release the model as the training step "
            "wrote it"
        )
    return backbone


def _changed_constants(backbone: Model, initial: Model, group: str) -> list[str]:
    """Returns the names of frozen tensors that differ from those of the public backbone.

    Only for groups that freeze whole layers: constants of features, and networks below a head or a
    projection, come from public images only.
    """
    from fedemb.models.backbones import trainable_variables
    from fedemb.models.imported import FROZEN

    if group not in FROZEN:
        return []
    trained = {item.path for item in trainable_variables(backbone, group)}
    plain = {
        item.path
        for layer in all_layers(initial)
        if hasattr(layer, "plain_weights")  # released as an ordinary convolution
        for item in layer.weights
    }
    before = {item.path: item.numpy() for item in initial.weights}
    return sorted(
        item.path
        for item in backbone.weights
        if item.path not in trained | plain and (item.numpy() != before[item.path]).any()
    )


def _variable(variable: Variable) -> tuple[str, tuple[int, ...]]:
    return variable.path, tuple(variable.shape)


def save_for_serving(backbone: Model, model: ModelConfig, folder: Path) -> Served:
    """Writes a SavedModel with one signature `serving_default`, and returns its function.

    Input `images`: uint8 `[n, size, size, channels]`, as `data/photos.py` reads them, because no
    graph decodes files exactly as training did. Output `embeddings`: float32 `[n, dim]`, rows of
    unit length; for classifiers `probabilities`: float32 `[n, classes]`, rows that sum to 1. A
    SavedModel is for other servers: no code of this package loads one.
    """
    import tensorflow as tf

    from fedemb.models.keras_backend import preprocess

    trainable, fixed = backbone.trainable_variables, backbone.non_trainable_variables
    pixels = tf.TensorSpec(
        [None, model.image_size, model.image_size, model.channels], tf.uint8, name="images"
    )

    class Serving(tf.Module):
        """Contains only the backbone's variables."""

        def __init__(self) -> None:
            super().__init__()
            self.weights = [tf.Variable(item, name=item.path) for item in [*trainable, *fixed]]

        @tf.function(input_signature=[pixels], autograph=False)  # pyright: ignore[reportUntypedFunctionDecorator]
        def embed(self, images: Any) -> dict[str, Any]:
            values = [tf.convert_to_tensor(item) for item in self.weights]
            output, *_ = backbone.stateless_call(
                values[: len(trainable)],
                values[len(trainable) :],
                preprocess(images),
                training=False,
            )
            output = tf.cast(output, tf.float32)
            if model.classes:
                return {"probabilities": tf.nn.softmax(output)}
            return {"embeddings": tf.math.l2_normalize(output, axis=1)}

    serving = Serving()
    tf.saved_model.save(serving, folder, signatures={"serving_default": serving.embed})
    (folder / "assets").rmdir()
    (folder / "fingerprint.pb").unlink()  # outdated by the next line, with a random number
    write_bytes(
        folder / "saved_model.pb", _of_any_process((folder / "saved_model.pb").read_bytes())
    )
    output = "probabilities" if model.classes else "embeddings"
    return lambda images: serving.embed(tf.constant(images))[output].numpy()


def serving_problem(folder: Path, backbone: Path, model: ModelConfig) -> str | None:
    """Rebuilds the backbone from its file and saves it again; returns a difference, or None.

    The check ensures that a SavedModel contains only the code's output for the backbone's settings
    and weights: no constant, text or function that contains a head, an update or data.

    Raises:
      ArtifactError: the backbone cannot be loaded.
      OSError: the SavedModel cannot be read.
    """
    import tensorflow as tf

    from fedemb.models.backbone_files import load_backbone

    with tempfile.TemporaryDirectory(prefix="fedemb-serving-") as scratch:
        again = Path(scratch, folder.name)
        save_for_serving(load_backbone(backbone, model), model, again)
        for name in SAVED_MODEL_FILES:
            if (folder / name).read_bytes() != (again / name).read_bytes():
                return (
                    f"{name} of saved_model is not what TensorFlow {tf.__version__} and this "
                    "package make of backbone.keras; look with the versions it was released with"
                )
    return None


def _of_any_process(data: bytes) -> bytes:
    """Returns the graph without process-specific parts: counters, threads and devices."""
    from google.protobuf import text_format
    from tensorflow.core.protobuf import saved_model_pb2

    model: Any = saved_model_pb2.SavedModel()
    model.ParseFromString(data)
    text = text_format.MessageToString(model)
    numbers = sorted({int(number) for _, number in _FUNCTION.findall(text)})
    rank = {str(number): position for position, number in enumerate(numbers)}
    text = _FUNCTION.sub(lambda found: f"{found[1]}_{rank[found[2]]:08d}", text)
    text_format.Parse(text, model := saved_model_pb2.SavedModel())
    for graph in model.meta_graphs:
        functions = graph.graph_def.library.function
        functions.sort(key=lambda function: function.signature.name)
        for node in chain(graph.graph_def.node, *(each.node_def for each in functions)):
            node.attr.pop("config_proto", None)
        for argument in (item for each in functions for item in each.arg_attr.values()):
            name = argument.attr["_user_specified_name"]
            if name.s.isdigit() and len(name.s) <= _LONGEST_NUMBER:  # name of a captured weight
                name.s = b""
    return model.SerializeToString(deterministic=True)


def save_for_users(backbone: Model, config: RunConfig, bundle: Path) -> None:
    """Adds the SavedModel and the preprocessing module to a bundle."""
    served = save_for_serving(backbone, config.model, bundle / SAVED_MODEL)
    save_preprocessing(backbone, config, bundle, served)


def save_preprocessing(backbone: Model, config: RunConfig, bundle: Path, served: Served) -> None:
    """Adds the preprocessing module to the bundle, and its expected results.

    A bundle user has `preprocessing.py` and the SavedModel, whose function is `served`. Both must
    give the results of training and evaluation for photos in every encoding.

    Raises:
      Refused: the results differ.
    """
    from fedemb.models.inference import classify, embed

    reader = photos.PhotoReader(*config.model.photo)
    compute = classify if config.model.classes else embed
    write_parity(bundle / PARITY, partial(compute, backbone), reader)
    shipped = bundle / "preprocessing.py"
    write_bytes(shipped, Path(photos.__file__).read_bytes())
    module = _module(shipped)
    require_parity(
        bundle / PARITY, module.PhotoReader(*config.model.photo).read, served, exact=True
    )


def _module(path: Path) -> Any:
    """Loads a Python file separately from the package; writes nothing next to it."""
    module = ModuleType(path.stem)
    sys.modules[path.stem] = module  # its dataclass resolves its types here
    try:
        exec(compile(read_regular(path), path.name, "exec"), module.__dict__)
    finally:
        del sys.modules[path.stem]
    return module
