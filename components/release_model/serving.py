"""The model as TensorFlow Serving takes it: images in, embeddings or probabilities out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedemb.config import ModelConfig
from fedemb.errors import Refused
from fedemb.steps.release_model.whitelist import serving_problem

__all__ = ["load_whitelisted", "save_for_serving", "serving_problem"]


def load_whitelisted(path: Path, start: Path, model: ModelConfig) -> Any:
    """Loads a backbone and checks that its tensors are those it started with, and no other.

    Args:
      path: the trained backbone.
      start: the public backbone before private training, which is the whitelist.
      model: what both must fit.

    Raises:
      Refused: a tensor is missing, extra, or has another shape.
    """
    from fedemb.embedding.loading import load_backbone

    backbone = load_backbone(path, model)
    allowed = {_variable(item) for item in load_backbone(start, model).weights}
    found = {_variable(item) for item in backbone.weights}
    if found != allowed:
        names = sorted(name for name, _ in found ^ allowed)
        raise Refused(
            f"the model holds other tensors than the backbone it started from: {', '.join(names)}; "
            "save the backbone alone, without head or optimizer"
        )
    return backbone


def _variable(variable: Any) -> tuple[str, tuple[int, ...]]:
    return variable.path, tuple(variable.shape)


def save_for_serving(backbone: Any, model: ModelConfig, folder: Path) -> None:
    """Writes a SavedModel with one signature `serving_default`.

    Input `images`: string `[n]`, PNG or JPEG files. Output `embeddings`: float32 `[n, dim]`, rows
    of unit length; of a classifier `probabilities`: float32 `[n, classes]`, rows that sum to 1.
    """
    import tensorflow as tf

    from fedemb.embedding import decode_image, preprocess

    trainable, fixed = backbone.trainable_variables, backbone.non_trainable_variables

    class Serving(tf.Module):
        """Holds the backbone's variables and nothing else."""

        def __init__(self) -> None:
            super().__init__()
            self.weights = [tf.Variable(item, name=item.path) for item in [*trainable, *fixed]]

        @tf.function(input_signature=[tf.TensorSpec([None], tf.string, name="images")])
        def embed(self, images: Any) -> dict[str, Any]:
            decoded = tf.map_fn(
                lambda data: decode_image(data, model.image_size, model.channels),
                images,
                fn_output_signature=tf.TensorSpec(
                    [model.image_size, model.image_size, model.channels], tf.uint8
                ),
            )
            values = [tf.convert_to_tensor(item) for item in self.weights]
            output, _ = backbone.stateless_call(
                values[: len(trainable)],
                values[len(trainable) :],
                preprocess(decoded),
                training=False,
            )
            output = tf.cast(output, tf.float32)
            if model.classes:
                return {"probabilities": tf.nn.softmax(output)}
            return {"embeddings": tf.math.l2_normalize(output, axis=1)}

    serving = Serving()
    tf.saved_model.save(serving, folder, signatures={"serving_default": serving.embed})
    (folder / "assets").rmdir()
