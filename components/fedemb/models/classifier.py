"""A classifier: a backbone and one dense layer on its embedding, in one Keras model.

It maps float32 images `[batch, size, size, channels]` in [-1, 1] to logits `[batch, classes]`.
"""

from __future__ import annotations

from fedemb.config import ModelConfig
from fedemb.models.arrays import Model
from fedemb.models.keras_backend import keras_layers

HEAD = "logits"
"""Name of the last layer."""


def with_head(backbone: Model, model: ModelConfig, seed: int = 0) -> Model:
    """Adds a head to a backbone, whose layers are shared.

    A zero head makes the first steps those of a convex problem; see `ModelConfig.head_init`.

    Args:
      backbone: images to features.
      model: number of classes, and initialization of the head.
      seed: seed of a randomly initialized head.
    """
    import keras

    uniform = keras.initializers.GlorotUniform(seed=seed)
    start = "zeros" if model.head_init == "zeros" else uniform
    head = keras_layers().Dense(len(model.classes), kernel_initializer=start, name=HEAD)
    return keras.Model(backbone.input, head(backbone.output), name=backbone.name)


def without_head(classifier: Model) -> Model:
    """Returns the backbone of a classifier; the layers are shared."""
    import keras

    return keras.Model(classifier.input, classifier.get_layer(HEAD).input, name=classifier.name)
