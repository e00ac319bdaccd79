"""Embeddings of images under a finished backbone."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

_TRACED: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def embed(backbone: Any, images: np.ndarray, batch_size: int = 256) -> np.ndarray:
    """Embeds images and scales every embedding to unit length.

    Args:
      backbone: from `build_backbone` or loaded.
      images: uint8 `[images, size, size, channels]`.
      batch_size: images in memory at once as floats; the last batch is padded, so that an
        embedding does not depend on how many images come after it.

    Returns:
      float32 `[images, embedding_dim]`, rows of unit length.
    """
    import tensorflow as tf

    from fedemb.embedding.preprocessing import preprocess

    traced = _TRACED.get(backbone)
    if traced is None:

        @tf.function(reduce_retracing=True)
        def forward(batch: Any) -> Any:
            return tf.math.l2_normalize(
                tf.cast(backbone(preprocess(batch), training=False), tf.float32), axis=1
            )

        traced = _TRACED[backbone] = forward
    count = len(images)
    result = np.empty((count, backbone.output_shape[-1]), np.float32)
    for start in range(0, count, batch_size):
        batch = images[start : start + batch_size]
        used = len(batch)
        if used < batch_size:
            padding = np.zeros((batch_size - used, *batch.shape[1:]), batch.dtype)
            batch = np.concatenate([batch, padding])
        result[start : start + used] = traced(tf.constant(batch)).numpy()[:used]
    return result
