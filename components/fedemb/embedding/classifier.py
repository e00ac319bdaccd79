"""A classifier: a backbone and one dense layer on its embedding.

It maps float32 images `[batch, size, size, channels]` in [-1, 1] to logits `[batch, classes]`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

HEAD = "head"
"""Name of the last layer."""


def build_classifier(backbone: Any, classes: int, *, init: str, seed: int) -> Any:
    """Puts a head on a backbone, which it shares; the order of its logits is the order of classes.

    Args:
      backbone: `keras.Model` from `build_backbone` or `load_backbone`.
      classes: how many, 2 at least.
      init: `zeros`, from which the first steps are those of a convex problem, or `glorot`.
      seed: of a random head.
    """
    import keras

    layer: Any = keras.layers.Dense(classes, kernel_initializer="zeros", name=HEAD)
    model = keras.Model(backbone.input, layer(backbone.output), name=backbone.name)
    if init == "glorot":
        limit = float(np.sqrt(6.0 / sum(layer.kernel.shape)))
        random = np.random.default_rng(np.random.SeedSequence([seed, classes]))
        layer.kernel.assign(random.uniform(-limit, limit, layer.kernel.shape).astype(np.float32))
    return model


def without_head(classifier: Any) -> Any:
    """The backbone of a classifier, which it shares."""
    import keras

    return keras.Model(classifier.input, classifier.get_layer(HEAD).input, name=classifier.name)
