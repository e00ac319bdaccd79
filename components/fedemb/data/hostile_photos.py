"""Test picture in all encodings that phones, scanners and web pages produce.

A reader that ignores EXIF, alpha or a colour space rotates the picture, tints it or fails to open
it. Two readers that agree on all encodings read photos in the same way.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from PIL import Image

_ORIENTATION = 0x0112
_STORED_AS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}
"""EXIF orientation -> transpose that the camera applied."""


@dataclass(frozen=True)
class HostilePhoto:
    """One file, and its correct pixels."""

    name: str
    data: bytes
    pixels: np.ndarray
    """uint8 [height, width, 3]."""


def hostile_photos() -> Iterator[HostilePhoto]:
    """Yields every encoding; the picture has no symmetry, so all rotations differ."""
    picture = _picture(61, 43)
    grey, palette = picture.convert("L"), picture.quantize(64)
    glass, on_white = _glass(picture)
    other = picture.transpose(Image.Transpose.ROTATE_180)
    wide = Image.fromarray(np.asarray(grey).astype(np.uint16) << 8)
    hole, clear = _hole(palette, 0), {"transparency": 0}
    sharp, lossless, fine = {"quality": 95}, {"lossless": True}, {"quality": 95, "subsampling": 0}
    frames = {"save_all": True, "append_images": [other], "duration": 100}
    for number in range(1, 9):
        yield _turned(f"jpeg exif {number}", picture, "JPEG", number, **fine)
    yield _photo("jpeg grey", grey, "JPEG", **sharp)
    yield _photo("jpeg cmyk", picture.convert("CMYK"), "JPEG", picture, **sharp)
    yield _photo("jpeg progressive", picture, "JPEG", progressive=True, **sharp)
    yield _photo("png rgb", picture, "PNG")
    yield _photo("png rgba", glass, "PNG", on_white)
    yield _photo("png grey", grey, "PNG")
    yield _photo("png grey alpha", glass.convert("LA"), "PNG", on_white.convert("L"))
    yield _photo("png palette", palette, "PNG")
    yield _photo("png palette transparent", palette, "PNG", hole, **clear)
    yield _photo("png 16 bit", wide, "PNG", grey)
    yield _photo("png 1 bit", grey.convert("1"), "PNG")
    yield _turned("png exif 6", picture, "PNG", 6)
    yield _photo("webp", picture, "WEBP", **sharp)
    yield _photo("webp lossless", picture, "WEBP", **lossless)
    yield _photo("webp alpha", glass, "WEBP", on_white, **lossless)
    yield _turned("webp exif 8", picture, "WEBP", 8, **lossless)
    yield _photo("webp animated", picture, "WEBP", **lossless, **frames)
    yield _photo("gif", palette, "GIF")
    yield _photo("gif transparent", palette, "GIF", hole, **clear)
    yield _photo("gif animated", palette, "GIF", save_all=True, append_images=[other.quantize(64)])
    yield _photo("heic", picture, "HEIF", **sharp)
    yield _turned("heic exif 6", picture, "HEIF", 6, **sharp)
    yield _photo("heic alpha", glass, "HEIF", on_white, **sharp)
    yield _photo("avif", picture, "AVIF", **sharp)
    yield _photo("avif alpha", glass, "AVIF", on_white, **sharp)
    for name, size in (("wide", (180, 24)), ("tall", (24, 180)), ("large", (480, 360))):
        yield _photo(f"jpeg {name}", _picture(*size), "JPEG", **sharp)


def _picture(width: int, height: int) -> Image.Image:
    """Returns a picture with a red corner, a green corner and a blue edge on a grey gradient."""
    y, x = np.mgrid[:height, :width]
    slope = (40 + 150 * (x / width + y / height) / 2).astype(np.uint8)
    pixels = np.stack([slope] * 3, axis=-1)
    pixels[: height // 3, : width // 3] = (220, 30, 30)
    pixels[-height // 4 :, -width // 3 :] = (30, 200, 60)
    pixels[height // 2 :, : width // 6] = (30, 60, 210)
    return Image.fromarray(pixels)


def _photo(
    name: str, stored: Image.Image, kind: str, look: Image.Image | None = None, /, **options: object
) -> HostilePhoto:
    sink = io.BytesIO()
    stored.save(sink, kind, **options)
    return HostilePhoto(name, sink.getvalue(), np.asarray((look or stored).convert("RGB")))


def _turned(
    name: str, picture: Image.Image, kind: str, orientation: int, /, **options: object
) -> HostilePhoto:
    exif = Image.Exif()
    exif[_ORIENTATION] = orientation
    stored = picture.transpose(_STORED_AS[orientation]) if orientation > 1 else picture
    return _photo(name, stored, kind, picture, exif=exif.tobytes(), **options)


def _glass(picture: Image.Image) -> tuple[Image.Image, Image.Image]:
    """Returns the picture with a transparent right half, over black, and its look on white."""
    alpha = np.full((picture.height, picture.width), 255, np.uint8)
    alpha[:, picture.width // 2 :] = 0
    mask = Image.fromarray(alpha)
    glass = Image.composite(picture, Image.new("RGB", picture.size), mask)
    glass.putalpha(mask)
    return glass, Image.composite(picture, Image.new("RGB", picture.size, "white"), mask)


def _hole(palette: Image.Image, index: int) -> Image.Image:
    """Returns the look on white of a palette image whose colour `index` is transparent."""
    mask = Image.fromarray((np.asarray(palette) != index).astype(np.uint8) * 255)
    return Image.composite(palette.convert("RGB"), Image.new("RGB", palette.size, "white"), mask)
