"""A classifier: a backbone and one dense layer on its embedding, in one Keras model.

It maps float32 images `[batch, size, size, channels]` in [-1, 1] to logits `[batch, classes]`.
"""

from __future__ import annotations

from typing import Any

from fedemb.config import ModelConfig

HEAD = "logits"
"""Name of the last layer."""


def with_head(backbone: Any, model: ModelConfig, seed: int = 0) -> Any:
    """Puts a head on a backbone, which it shares.

    Zeros make the first steps those of a convex problem; see `ModelConfig.head_init`.

    Args:
      backbone: images to features.
      model: classes, and where the head starts.
      seed: of a head that starts at random.
    """
    import keras

    kinds: Any = keras.initializers
    start = "zeros" if model.head_init == "zeros" else kinds.GlorotUniform(seed=seed)
    head = keras.layers.Dense(len(model.classes), kernel_initializer=start, name=HEAD)
    return keras.Model(backbone.input, head(backbone.output), name=backbone.name)


def without_head(classifier: Any) -> Any:
    """The backbone of a classifier, which it shares."""
    import keras

    return keras.Model(classifier.input, classifier.get_layer(HEAD).input, name=classifier.name)
