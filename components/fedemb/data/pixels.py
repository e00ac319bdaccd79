"""Pixels in and out: any PNG or JPEG in, one canonical PNG out, and that one back very fast.

A canonical PNG has 8 bits, no filter, one IDAT chunk and nothing else, so it decodes in two
microseconds without an image library; every other program reads it too. Training never meets an
image that does not decode, because `decode_image` tried it first.
"""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np

from fedemb.errors import ArtifactError

_DATA = slice(41, -16)
_END = b"\0\0\0\0IEND\xaeB`\x82"
_COLOUR_TYPE = {1: 0, 3: 2}
_PARALLEL_FROM = 512


class BadImageError(Exception):
    """An image that is dropped; `reason` is a word for the rejects, never shown with a name."""

    def __init__(self, reason: str):
        super().__init__(reason)
        self.reason = reason


@cache
def _header(height: int, width: int, channels: int) -> bytes:
    body = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, _COLOUR_TYPE[channels], 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + body + struct.pack(">I", zlib.crc32(body))


def encode_png(pixels: np.ndarray) -> bytes:
    """Encodes one image as a canonical PNG; the same pixels give the same bytes.

    Args:
      pixels: uint8 [height, width, channels], 1 or 3 channels.
    """
    height, width, channels = pixels.shape
    raw = np.zeros((height, 1 + width * channels), np.uint8)
    raw[:, 1:] = pixels.reshape(height, width * channels)
    body = b"IDAT" + zlib.compress(raw.tobytes(), 3)
    data = struct.pack(">I", len(body) - 4) + body + struct.pack(">I", zlib.crc32(body))
    return _header(height, width, channels) + data + _END


def decode_pngs(images: Sequence[bytes], image_size: int, channels: int) -> np.ndarray:
    """Decodes canonical PNGs of one size.

    Returns:
      uint8 [images, image_size, image_size, channels].

    Raises:
      ArtifactError: one of them is not canonical or of another size.
    """
    header = _header(image_size, image_size, channels)

    def inflate(part: Sequence[bytes]) -> bytes:
        for image in part:
            if not image.startswith(header):
                raise ArtifactError(
                    f"a stored image is not a canonical PNG of {image_size}x{image_size}x"
                    f"{channels}; run partition_users with this configuration"
                )
        return b"".join([zlib.decompress(image[_DATA]) for image in part])

    rows = (len(images), image_size, 1 + image_size * channels)
    try:
        if len(images) * rows[1] * rows[2] < _PARALLEL_FROM * 4096:
            raw = inflate(images)
        else:
            parts = [images[start : start + 256] for start in range(0, len(images), 256)]
            with ThreadPoolExecutor(4) as pool:
                raw = b"".join(pool.map(inflate, parts))
        pixels = np.frombuffer(raw, np.uint8).reshape(rows)[:, :, 1:]
    except (zlib.error, ValueError) as error:
        raise ArtifactError(
            f"a stored image is damaged ({type(error).__name__}); run partition_users again"
        ) from error
    return np.ascontiguousarray(pixels).reshape(-1, image_size, image_size, channels)


def decode_image(data: Any, image_size: int, channels: int, max_pixels: int) -> np.ndarray:
    """Decodes any PNG or JPEG to the size of the model: the pixels of `canonical_image`."""
    return canonical_image(data, image_size, channels, max_pixels)[0]


def canonical_image(
    data: Any, image_size: int, channels: int, max_pixels: int
) -> tuple[np.ndarray, bytes]:
    """Decodes any PNG or JPEG, brings it to the size of the model and encodes it canonically.

    Transparency is laid on white, the orientation of EXIF is applied, 16 bits become 8, and the
    resize is bilinear with antialiasing, as `tf.image.resize(antialias=True)`.

    Args:
      data: encoded bytes.
      image_size: height and width of the result.
      channels: 1 (grey) or 3 (RGB).
      max_pixels: width x height above which the image is not decoded.

    Returns:
      Pixels, uint8 [image_size, image_size, channels], and their canonical PNG. What is canonical
      already stays as it is.

    Raises:
      BadImageError: not bytes, empty, too large, or not decodable.
    """
    if not isinstance(data, bytes):
        raise BadImageError("image_missing")
    if not data:
        raise BadImageError("image_empty")
    if data.startswith(_header(image_size, image_size, channels)):
        pixels = _decode_canonical(data, image_size, channels)
        if pixels is not None:
            return pixels, data
    pixels = _decode_with_pillow(data, image_size, channels, max_pixels)
    return pixels, encode_png(pixels)


def _decode_canonical(data: bytes, image_size: int, channels: int) -> np.ndarray | None:
    """Decodes our own PNG without Pillow; None: not ours, let Pillow look."""
    length, crc = int.from_bytes(data[33:37], "big"), data[-16:-12]
    if (
        length != len(data) - 57
        or data[37:41] != b"IDAT"
        or not data.endswith(_END)
        or zlib.crc32(data[37:-16]).to_bytes(4, "big") != crc
    ):
        return None
    wanted = image_size * (1 + image_size * channels)
    inflater = zlib.decompressobj()
    try:
        raw = inflater.decompress(data[_DATA], wanted + 1)
    except zlib.error:
        return None
    if len(raw) != wanted or not inflater.eof:
        return None
    rows = np.frombuffer(raw, np.uint8).reshape(image_size, -1)
    if rows[:, 0].any():
        return None
    return np.ascontiguousarray(rows[:, 1:]).reshape(image_size, image_size, channels)


def _decode_with_pillow(data: bytes, image_size: int, channels: int, max_pixels: int) -> np.ndarray:
    from PIL import Image, ImageOps

    try:
        image = Image.open(io.BytesIO(data), formats=("PNG", "JPEG"))
        if image.width * image.height > max_pixels:
            raise BadImageError("too_many_pixels")
        image.load()
        image = ImageOps.exif_transpose(image)
        if image.mode.startswith("I"):  # 16 bit
            image = Image.fromarray((np.asarray(image).astype(np.int64) >> 8).astype(np.uint8))
        if image.has_transparency_data:
            image = image.convert("RGBA")
            white = Image.new("RGBA", image.size, "white")
            image = Image.alpha_composite(white, image)
        image = image.convert("L" if channels == 1 else "RGB")
        if image.size != (image_size, image_size):
            image = image.resize((image_size, image_size), Image.Resampling.BILINEAR)
        return np.asarray(image, np.uint8).reshape(image_size, image_size, channels)
    except Image.DecompressionBombError as error:
        raise BadImageError("too_many_pixels") from error
    except BadImageError:
        raise
    except Exception as error:  # whatever a decoder throws at hostile bytes: the image is dropped
        raise BadImageError("not_decodable") from error
