"""Reads a photo file to model input pixels, identically in training and after release.

A release ships this file as `preprocessing.py`, so it needs only Pillow, NumPy and pillow-heif and
nothing else of the package. Readers with equal fields give equal pixels for equal bytes.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pillow_heif
from PIL import Image, ImageOps, PngImagePlugin

pillow_heif.register_heif_opener()

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "HEIF", "AVIF")
"""Supported formats; only the first frame is read. Each decoder is exposed to hostile bytes."""
MAX_BYTES = 256 << 20
"""Maximum bytes of a file; PNGs of 50 million pixels are usually smaller."""
MAX_PIXELS = 50_000_000
MAX_TEXT_BYTES = 64 << 20
"""Maximum bytes of the texts and of the colour profile of a PNG, decompressed. Pillow's own limit
of 1 MiB would reject scans with a large profile."""
_PILLOW_LIMITS = ("MAX_TEXT_CHUNK", "MAX_TEXT_MEMORY")
"""Limits of Pillow's PNG reader; its errors contain these names."""
_PADDING = 128
"""Grey value around a letterboxed image: 0 in the backbone's input range."""


class BadImageError(Exception):
    """Image that is dropped; `reason` is its category, never shown with a name."""

    def __init__(self, reason: str):
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True)
class PhotoReader:
    """Settings with which a model reads photo files; stored with the model."""

    image_size: int
    """Height and width of the result in pixels."""
    channels: int
    """1 grey, 3 RGB."""
    aspect_ratio: Literal["squash", "letterbox"] = "squash"
    """`squash`: stretched to the square; `letterbox`: proportions kept, padded with grey."""

    def read(self, data: object) -> np.ndarray:
        """Decodes a file and resizes it to the input size of the model.

        EXIF orientation is applied, transparency is composed on white, 16 bits are reduced to 8,
        and resizing is bilinear with antialiasing. A JPEG much larger than the result is decoded at
        a fraction of its size, which is at least twice the size of the result.

        Args:
          data: encoded bytes.

        Returns:
          uint8 [image_size, image_size, channels].

        Raises:
          BadImageError: the data is not bytes, empty, too large, or not decodable.
        """
        if not isinstance(data, bytes):
            raise BadImageError("image_missing")
        if not data:
            raise BadImageError("image_empty")
        if len(data) > MAX_BYTES:
            raise BadImageError("file_too_large")
        _raise_limits()
        try:
            image = Image.open(io.BytesIO(data), formats=FORMATS)
            if image.width * image.height > MAX_PIXELS:
                raise BadImageError("too_many_pixels")
            image.draft(None, (2 * self.image_size, 2 * self.image_size))
            image.load()
            return self._fit(_flat(ImageOps.exif_transpose(image), self.channels))
        except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
            raise BadImageError("too_many_pixels") from error
        except BadImageError:
            raise
        except Exception as error:  # decoders can raise anything at hostile bytes
            too_large = any(name in str(error) for name in _PILLOW_LIMITS)
            raise BadImageError("text_too_large" if too_large else "not_decodable") from error

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


def _raise_limits() -> None:
    """Raises Pillow's limits to those of this module, so that these decide; never lowers one."""
    if Image.MAX_IMAGE_PIXELS is not None:
        Image.MAX_IMAGE_PIXELS = max(Image.MAX_IMAGE_PIXELS, MAX_PIXELS)
    for limit in _PILLOW_LIMITS:
        setattr(PngImagePlugin, limit, max(getattr(PngImagePlugin, limit), MAX_TEXT_BYTES))


def _flat(image: Image.Image, channels: int) -> Image.Image:
    """Returns the image with 8 bits, without transparency, in grey or RGB."""
    if image.mode.startswith("I"):  # 16 bit
        image = Image.fromarray((np.asarray(image).astype(np.int64) >> 8).astype(np.uint8))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image)
    return image.convert("L" if channels == 1 else "RGB")
