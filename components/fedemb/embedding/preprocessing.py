"""From encoded image to the numbers a backbone sees."""

from __future__ import annotations

from typing import Any


def decode_image(encoded: Any, size: int, channels: int) -> Any:
    """Decodes one PNG or JPEG and brings it to the size a backbone was built for.

    Args:
      encoded: scalar string tensor, the bytes of the file.
      size: height and width in pixels.
      channels: 1 grey, 3 RGB.

    Returns:
      uint8 tensor `[size, size, channels]`: bilinear with antialiasing, the aspect ratio is not
      kept (paper, preprocessing of GLDv2 and iNaturalist). An image that has the size already
      comes back bit for bit.
    """
    import tensorflow as tf

    image = tf.io.decode_image(encoded, channels=channels, expand_animations=False)
    image.set_shape([None, None, channels])
    resized = tf.image.resize(image, [size, size], method="bilinear", antialias=True)
    image = tf.cast(tf.clip_by_value(tf.round(resized), 0.0, 255.0), tf.uint8)
    return tf.ensure_shape(image, [size, size, channels])


def preprocess(images: Any) -> Any:
    """Scales pixels to the range the backbones are trained on: `x / 128 - 1`.

    Args:
      images: uint8 (or any number) tensor `[..., height, width, channels]` in 0..255.

    Returns:
      float32 tensor of the same shape in [-1, 0.992].
    """
    import tensorflow as tf

    return tf.cast(images, tf.float32) * (1.0 / 128.0) - 1.0
