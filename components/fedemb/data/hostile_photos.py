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
    seen: np.ndarray
    """uint8 [height, width, 3]."""


def hostile_photos() -> Iterator[HostilePhoto]:
    """Yields every encoding; the picture has no symmetry, so all rotations differ."""
    picture = _picture(61, 43)
    yield from _jpeg(picture)
    yield from _png(picture)
    yield from _webp_and_gif(picture)
    yield from _heic(picture)
    yield from _avif(picture)
    for name, size in (("wide", (180, 24)), ("tall", (24, 180)), ("large", (480, 360))):
        yield _photo(f"jpeg {name}", _picture(*size), "JPEG", quality=95)


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
    name: str, stored: Image.Image, kind: str, seen: Image.Image | None = None, **options: object
) -> HostilePhoto:
    sink = io.BytesIO()
    stored.save(sink, kind, **options)
    shown = stored if seen is None else seen
    return HostilePhoto(name, sink.getvalue(), np.asarray(shown.convert("RGB")))


def _turned(picture: Image.Image, orientation: int) -> tuple[Image.Image, bytes]:
    exif = Image.Exif()
    exif[_ORIENTATION] = orientation
    stored = picture.transpose(_STORED_AS[orientation]) if orientation > 1 else picture
    return stored, exif.tobytes()


def _jpeg(picture: Image.Image) -> Iterator[HostilePhoto]:
    for orientation in range(1, 9):
        stored, exif = _turned(picture, orientation)
        yield _photo(
            f"jpeg exif {orientation}",
            stored,
            "JPEG",
            picture,
            exif=exif,
            quality=95,
            subsampling=0,
        )
    yield _photo("jpeg grey", picture.convert("L"), "JPEG", quality=95)
    yield _photo("jpeg cmyk", picture.convert("CMYK"), "JPEG", picture, quality=95)
    yield _photo("jpeg progressive", picture, "JPEG", progressive=True, quality=95)


def _png(picture: Image.Image) -> Iterator[HostilePhoto]:
    grey = picture.convert("L")
    glass, on_white = _glass(picture)
    yield _photo("png rgb", picture, "PNG")
    yield _photo("png rgba", glass, "PNG", on_white)
    yield _photo("png grey", grey, "PNG")
    yield _photo("png grey alpha", glass.convert("LA"), "PNG", on_white.convert("L"))
    yield _photo("png palette", picture.quantize(64), "PNG")
    palette = picture.quantize(64)
    yield _photo("png palette transparent", palette, "PNG", _hole(palette, 0), transparency=0)
    wide = Image.fromarray(np.asarray(grey).astype(np.uint16) << 8)
    yield _photo("png 16 bit", wide, "PNG", grey)
    yield _photo("png 1 bit", grey.convert("1"), "PNG")
    stored, exif = _turned(picture, 6)
    yield _photo("png exif 6", stored, "PNG", picture, exif=exif)


def _webp_and_gif(picture: Image.Image) -> Iterator[HostilePhoto]:
    glass, on_white = _glass(picture)
    stored, exif = _turned(picture, 8)
    other = picture.transpose(Image.Transpose.ROTATE_180)
    palette = picture.quantize(64)
    frames = {"save_all": True, "append_images": [other], "duration": 100}
    yield _photo("webp", picture, "WEBP", quality=95)
    yield _photo("webp lossless", picture, "WEBP", lossless=True)
    yield _photo("webp alpha", glass, "WEBP", on_white, lossless=True)
    yield _photo("webp exif 8", stored, "WEBP", picture, exif=exif, lossless=True)
    yield _photo("webp animated", picture, "WEBP", lossless=True, **frames)
    yield _photo("gif", palette, "GIF")
    yield _photo("gif transparent", palette, "GIF", _hole(palette, 0), transparency=0)
    yield _photo("gif animated", palette, "GIF", save_all=True, append_images=[other.quantize(64)])


def _heic(picture: Image.Image) -> Iterator[HostilePhoto]:
    glass, on_white = _glass(picture)
    stored, exif = _turned(picture, 6)
    yield _photo("heic", picture, "HEIF", quality=95)
    yield _photo("heic exif 6", stored, "HEIF", picture, exif=exif, quality=95)
    yield _photo("heic alpha", glass, "HEIF", on_white, quality=95)


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


def _avif(picture: Image.Image) -> Iterator[HostilePhoto]:
    glass, on_white = _glass(picture)
    yield _photo("avif", picture, "AVIF", quality=95)
    yield _photo("avif alpha", glass, "AVIF", on_white, quality=95)
