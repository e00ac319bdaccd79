"""The model for TensorFlow Serving: pixels in, embeddings or probabilities out."""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from fedemb.config import ModelConfig, RunConfig
from fedemb.data import photos
from fedemb.errors import Refused
from fedemb.foundation.files import write_bytes
from fedemb.models.arrays import Model, Variable
from fedemb.models.keras_backend import all_layers
from fedemb.serving.bundle import SAVED_MODEL_FILES

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
    from fedemb.models.loading import load_backbone

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

    from fedemb.engine import preprocess

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
                # Without a division by 1, the graph of earlier releases stays the same.
                scaled = output / model.temperature if model.temperature > 1 else output
                return {"probabilities": tf.nn.softmax(scaled)}
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

    from fedemb.models.loading import load_backbone

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


def save_preprocessing(backbone: Model, config: RunConfig, bundle: Path, served: Served) -> None:
    """Adds the preprocessing module to the bundle, and its expected results.

    A bundle user has `preprocessing.py` and the SavedModel, whose function is `served`. Both must
    give the results of training and evaluation for photos in every encoding.

    Raises:
      Refused: the results differ.
    """
    from fedemb.models.inference import classify, embed
    from fedemb.serving.released import PARITY, require_parity, write_parity

    reader = photos.PhotoReader.of(config.model, config.data.max_pixels)
    chances = partial(classify, temperature=config.model.temperature)
    compute = chances if config.model.classes else embed
    write_parity(bundle / PARITY, partial(compute, backbone), reader)
    shipped = bundle / "preprocessing.py"
    write_bytes(shipped, Path(photos.__file__).read_bytes())
    module = _module(shipped)
    require_parity(
        bundle / PARITY,
        module.PhotoReader.of(config.model, config.data.max_pixels).read,
        served,
        exact=True,
    )


def check_parity(bundle: Path) -> None:
    """Raises Refused if a bundle gives other embeddings than at its release."""
    from fedemb.serving.released import ReleasedModel

    ReleasedModel(bundle).check_parity()


def _module(path: Path) -> Any:
    """Loads a Python file separately from the package; writes nothing next to it."""
    module = ModuleType(path.stem)
    sys.modules[path.stem] = module  # its dataclass resolves its types here
    try:
        exec(compile(path.read_bytes(), path.name, "exec"), module.__dict__)
    finally:
        del sys.modules[path.stem]
    return module
