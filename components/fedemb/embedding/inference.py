"""Embeddings of images under a finished backbone."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from jaxtyping import Float32, UInt8

from fedemb.backend import keras_ops, traced
from fedemb.embedding.losses import unit_rows

_TRACED: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def embed(
    backbone: Any, images: UInt8[np.ndarray, "images size size channels"], batch_size: int = 256
) -> Float32[np.ndarray, "images dim"]:
    """Embeds images and scales every embedding to unit length.

    Args:
      backbone: from `build_backbone` or loaded.
      images: uint8 `[images, size, size, channels]`.
      batch_size: images in memory at once as floats; the last batch is padded, so that an
        embedding does not depend on how many images come after it.

    Returns:
      float32 `[images, embedding_dim]`, rows of unit length.
    """
    from fedemb.embedding.preprocessing import preprocess

    ops = keras_ops()

    def forward(batch: Any) -> Any:
        return unit_rows(ops.cast(backbone(preprocess(batch), training=False), "float32"))

    if backbone not in _TRACED:
        _TRACED[backbone] = traced(forward)
    count = len(images)
    result = np.empty((count, backbone.output_shape[-1]), np.float32)
    for start in range(0, count, batch_size):
        batch = images[start : start + batch_size]
        used = len(batch)
        if used < batch_size:
            padding = np.zeros((batch_size - used, *batch.shape[1:]), batch.dtype)
            batch = np.concatenate([batch, padding])
        result[start : start + used] = np.asarray(_TRACED[backbone](batch))[:used]
    return result
