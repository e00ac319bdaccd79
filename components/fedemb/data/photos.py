"""Reads a photo file to the pixels a model takes: the one way, in training and after release.

A release ships this file as `preprocessing.py`, so it needs Pillow, NumPy and pillow-heif and
nothing of the package. Two readers with the same fields give the same pixels for the same bytes.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pillow_heif
from PIL import Image, ImageOps

pillow_heif.register_heif_opener()

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "HEIF", "AVIF")
"""What is read; of several frames the first. Every decoder more is one more for hostile bytes."""
MAX_BYTES = 256 << 20
"""Bytes of a file above which it is not read; 50 million pixels as PNG have fewer, as a rule."""
MAX_PIXELS = 50_000_000
_PADDING = 128
"""Grey beside a letterboxed image: 0 in the numbers the backbone sees."""


class BadImageError(Exception):
    """An image that is dropped; `reason` is a word for the rejects, never shown with a name."""

    def __init__(self, reason: str):
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True)
class PhotoReader:
    """How a model reads a file; the fields travel with it."""

    image_size: int
    """Height and width of the result."""
    channels: int
    """1 grey, 3 RGB."""
    aspect_ratio: Literal["squash", "letterbox"] = "squash"
    """Stretch to the square, or keep the proportions and fill up with grey."""
    max_pixels: int = MAX_PIXELS
    """Width x height above which a file is not decoded."""

    @classmethod
    def of(cls, model: Any, max_pixels: int = MAX_PIXELS) -> PhotoReader:
        """The reader of a model's configuration."""
        return cls(model.image_size, model.channels, model.aspect_ratio, max_pixels)

    def read(self, data: Any) -> np.ndarray:
        """Decodes a file and brings it to the size of the model.

        The orientation of EXIF is applied, transparency is laid on white, 16 bits become 8, and the
        resize is bilinear with antialiasing. A JPEG much larger than the result is decoded at a
        fraction of its size, which is at least twice that of the result.

        Args:
          data: encoded bytes.

        Returns:
          uint8 [image_size, image_size, channels].

        Raises:
          BadImageError: not bytes, empty, too large, or not decodable.
        """
        if not isinstance(data, bytes):
            raise BadImageError("image_missing")
        if not data:
            raise BadImageError("image_empty")
        if len(data) > MAX_BYTES:
            raise BadImageError("file_too_large")
        try:
            image = Image.open(io.BytesIO(data), formats=FORMATS)
            if image.width * image.height > self.max_pixels:
                raise BadImageError("too_many_pixels")
            image.draft(None, (2 * self.image_size, 2 * self.image_size))
            image.load()
            return self._fit(_flat(ImageOps.exif_transpose(image), self.channels))
        except Image.DecompressionBombError as error:
            raise BadImageError("too_many_pixels") from error
        except BadImageError:
            raise
        except Exception as error:  # whatever a decoder throws at hostile bytes: dropped
            raise BadImageError("not_decodable") from error

    def _fit(self, image: Image.Image) -> np.ndarray:
        size = self.image_size
        scale = size / max(image.size)
        inner = (size, size)
        if self.aspect_ratio == "letterbox":
            inner = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
        if image.size != inner:
            image = image.resize(inner, Image.Resampling.BILINEAR)
        pixels = np.full((size, size, self.channels), _PADDING, np.uint8)
        left, top = (size - inner[0]) // 2, (size - inner[1]) // 2
        shape = (inner[1], inner[0], self.channels)
        pixels[top : top + inner[1], left : left + inner[0]] = np.asarray(image).reshape(shape)
        return pixels


def _flat(image: Image.Image, channels: int) -> Image.Image:
    """Eight bits, no transparency, grey or RGB."""
    if image.mode.startswith("I"):  # 16 bit
        image = Image.fromarray((np.asarray(image).astype(np.int64) >> 8).astype(np.uint8))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image)
    return image.convert("L" if channels == 1 else "RGB")
