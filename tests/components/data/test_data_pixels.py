"""Canonical images: what goes in, what comes out, and that everybody can read it."""

from __future__ import annotations

import io
import zlib
from contextlib import suppress
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from fedemb.data import photos
from fedemb.data.hostile_photos import HostilePhoto, hostile_photos
from fedemb.data.photos import BadImageError, PhotoReader
from fedemb.data.pixels import canonical_image, decode_pngs, encode_png
from fedemb.errors import ArtifactError

LIMIT = 1_000_000
PHOTOS = list(hostile_photos())


def decode_image(data: object, size: int, channels: int, limit: int) -> np.ndarray:
    with mock.patch.object(photos, "MAX_PIXELS", limit):
        return PhotoReader(size, channels).read(data)


def encoded(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    sink = io.BytesIO()
    image.save(sink, kind, **options)
    return sink.getvalue()


def noise(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, shape, np.uint8)


@given(st.integers(1, 40), st.sampled_from([1, 3]), st.integers(0, 9))
@settings(max_examples=40, deadline=None)
def test_canonical_png_is_read_back_by_us_and_by_others(
    size: int, channels: int, seed: int
) -> None:
    pixels = np.random.default_rng(seed).integers(0, 256, (size, size, channels), np.uint8)
    data = encode_png(pixels)
    np.testing.assert_array_equal(decode_pngs([data, data], size, channels)[1], pixels)
    np.testing.assert_array_equal(
        np.asarray(Image.open(io.BytesIO(data))).reshape(pixels.shape), pixels
    )
    again, kept = canonical_image(data, PhotoReader(size, channels))
    np.testing.assert_array_equal(again, pixels)
    assert kept == data


def test_many_images_decoded_in_parallel_keep_their_order() -> None:
    pixels = noise(3000, 28, 28, 1)
    images = [encode_png(one) for one in pixels]
    np.testing.assert_array_equal(decode_pngs(images, 28, 1), pixels)


@pytest.mark.parametrize("bad", [b"", b"junk", encode_png(noise(9, 9, 1)), None])
def test_stored_image_that_is_not_canonical_is_one_sentence(bad: bytes | None) -> None:
    damaged = bytearray(encode_png(noise(8, 8, 1)))
    damaged[45:50] = b"xxxxx"
    with pytest.raises(ArtifactError, match="partition_users"):
        decode_pngs([bytes(damaged) if bad is None else bad], 8, 1)


def test_one_bit_grey_palette_and_colour_become_the_models_channels() -> None:
    grey = Image.fromarray(noise(20, 20))
    for image in (grey, grey.convert("1"), grey.convert("P"), grey.convert("RGB")):
        for channels in (1, 3):
            assert decode_image(encoded(image), 20, channels, LIMIT).shape == (20, 20, channels)
    np.testing.assert_array_equal(decode_image(encoded(grey), 20, 1, LIMIT)[..., 0], grey)


def test_transparency_is_laid_on_white() -> None:
    clear = Image.new("RGBA", (8, 8), (0, 0, 0, 0))
    assert decode_image(encoded(clear), 8, 3, LIMIT).min() == 255
    palette = Image.new("P", (8, 8), 0)
    assert decode_image(encoded(palette, transparency=0), 8, 1, LIMIT).min() == 255


def test_sixteen_bits_become_eight() -> None:
    wide = Image.fromarray(np.full((8, 8), 0x8000, np.uint16))
    assert set(decode_image(encoded(wide), 8, 1, LIMIT).ravel()) == {0x80}


def test_orientation_is_applied_and_exif_is_gone() -> None:
    upright = np.zeros((16, 16, 3), np.uint8)
    upright[:8] = 255
    exif = Image.Exif()
    exif[0x0112] = 3  # upside down
    exif[0x010E] = "the name of somebody"
    data = encoded(Image.fromarray(upright), "JPEG", exif=exif, quality=95)
    pixels, png = canonical_image(data, PhotoReader(16, 3))
    assert pixels[:8].mean() < 5
    assert pixels[8:].mean() > 250
    assert b"somebody" not in png


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("photo", PHOTOS, ids=lambda photo: photo.name)
def test_every_encoding_is_read_as_a_person_sees_it(photo: HostilePhoto, channels: int) -> None:
    seen = Image.fromarray(photo.seen).convert("L" if channels == 1 else "RGB")
    wanted = np.asarray(seen.resize((32, 32), Image.Resampling.BILINEAR)).reshape(32, 32, channels)
    found = PhotoReader(32, channels).read(photo.data)
    assert np.abs(found.astype(int) - wanted).mean() < 2  # lossy formats; a turn is far above 5
    again, _ = canonical_image(photo.data, PhotoReader(32, channels))
    np.testing.assert_array_equal(again, found)


def test_letterbox_keeps_proportions_and_fills_with_grey() -> None:
    red = encoded(Image.new("RGB", (200, 50), (255, 0, 0)))
    pixels = PhotoReader(32, 3, "letterbox").read(red)
    assert (pixels[12:20] == (255, 0, 0)).all()
    assert (pixels[:12] == 128).all()
    assert (pixels[20:] == 128).all()
    assert (PhotoReader(32, 3).read(red) == (255, 0, 0)).all()


@given(st.binary(max_size=200), st.integers(0, 199), st.integers(0, 255))
@settings(max_examples=200, deadline=None)
def test_hostile_bytes_never_raise_anything_else(junk: bytes, place: int, value: int) -> None:
    damaged = bytearray(encode_png(noise(8, 8, 1)))
    damaged[place % len(damaged)] = value
    for data in (junk, bytes(damaged), bytes(damaged) + junk):
        with suppress(BadImageError):
            assert decode_image(data, 8, 1, LIMIT).shape == (8, 8, 1)


def test_bytes_after_the_pixels_of_a_canonical_png_are_not_kept() -> None:
    """Otherwise, one hostile file of a few pixels could weigh megabytes in every shuffle."""
    reader = PhotoReader(28, 1)
    _, png = canonical_image(encoded(Image.fromarray(noise(28, 28))), reader)
    packed = png[41:-16] + bytes(100_000)
    body = b"IDAT" + packed
    swollen = (
        png[:33]
        + len(packed).to_bytes(4, "big")
        + body
        + zlib.crc32(body).to_bytes(4, "big")
        + png[-12:]
    )
    pixels, kept = canonical_image(swollen, reader)
    assert kept == png
    assert np.array_equal(pixels, reader.read(png))
