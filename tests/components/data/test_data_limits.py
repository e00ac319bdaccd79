"""Limits of the libraries that read files: ours decide, and messages name them."""

from __future__ import annotations

import io
import os
import struct
import zlib
from contextlib import suppress
from decimal import Decimal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, PngImagePlugin

from fedemb.data import image_files, photos, tables
from fedemb.data.hostile_photos import HostilePhoto, hostile_photos
from fedemb.data.identity import name_problem, name_text
from fedemb.data.image_files import ImageFiles
from fedemb.data.photos import MAX_BYTES, BadImageError, PhotoReader
from fedemb.data.pixels import canonical_image, decode_pngs, encode_png
from fedemb.data.tables import (
    LARGEST_RECORD,
    LARGEST_ROW,
    Part,
    iter_tfrecord,
    lines_in_quotes,
    open_csv,
    open_parquet,
)
from fedemb.errors import ArtifactError, InputError
from fedemb.partition.check import check
from fedemb.release.embed_photos import decoded
from fedemb.release.photo_source import PhotoSource
from tests.kit.pipeline_runs.partition_run import make_config, picture

PIXELS = np.random.default_rng(0).integers(0, 255, (48, 48, 3), np.uint8)


def encoded(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    sink = io.BytesIO()
    image.save(sink, kind, **options)
    return sink.getvalue()


def png(**options: object) -> bytes:
    return encoded(Image.fromarray(PIXELS), **options)


def with_text(size: int, kind: str) -> bytes:
    info = PngImagePlugin.PngInfo()
    if kind == "profile":
        return png(icc_profile=bytes(size))
    (info.add_text if kind == "text" else info.add_itxt)("Comment", "x" * size, zip=True)
    return png(pnginfo=info)


# ---- photos --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["text", "international text", "profile"])
def test_png_text_above_the_pillow_default_limit_is_read(kind):
    read = PhotoReader(48, 3).read(with_text(3 << 20, kind))
    np.testing.assert_array_equal(read, PIXELS)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["text", "international text", "profile"])
def test_text_above_our_limit_is_named_as_the_reason(kind):
    with pytest.raises(BadImageError, match="text_too_large"):
        PhotoReader(48, 3).read(with_text(photos.MAX_TEXT_BYTES + 1, kind))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("pillow", [None, 500_000], ids=["no limit", "error from a million on"])
@pytest.mark.parametrize(("limit", "pixels"), [(2_000_000, (8, 8, 1)), (1_400_000, None)])
def test_max_pixels_decides_whatever_the_limit_of_pillow(monkeypatch, pillow, limit, pixels):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", pillow)
    monkeypatch.setattr(photos, "MAX_PIXELS", limit)
    data = encoded(Image.new("1", (1500, 1000)))
    if pixels:
        assert PhotoReader(8, 1).read(data).shape == pixels
        return
    with pytest.raises(BadImageError, match="too_many_pixels"):
        PhotoReader(8, 1).read(data)


# ---- Parquet -------------------------------------------------------------------------------------


def parquet(folder: Path, metadata: dict[str, str], kind: pa.DataType | None = None) -> Part:
    table = pa.table({"image": [b"x"], "user_id": ["a"], "n": pa.nulls(1, kind or pa.int8())})
    pq.write_table(table.replace_schema_metadata(metadata), folder / "a.parquet")
    return Part(str(folder), "a.parquet", title="a.parquet")


@pytest.mark.long
def test_parquet_metadata_above_the_pyarrow_default_limit_is_read(tmp_path):
    with open_parquet(parquet(tmp_path, {"big": "x" * (101 << 20)})) as file:
        assert file.metadata.num_rows == 1


def test_parquet_metadata_above_our_limit_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "LARGEST_TEXT", 1 << 20)
    refused = pytest.raises(InputError, match="a text of more than 1,048,576 bytes")
    with refused, open_parquet(parquet(tmp_path, {"big": "x" * (2 << 20)})):
        pass


def test_parquet_with_more_row_groups_than_our_limit_is_refused(tmp_path, monkeypatch):
    pq.write_table(pa.table({"n": range(9)}), tmp_path / "a.parquet", row_group_size=1)
    part = Part(str(tmp_path), "a.parquet", title="a.parquet")
    for limit, read in ((9, True), (8, False)):
        monkeypatch.setattr(tables, "MOST_ITEMS", limit)
        if read:
            with open_parquet(part) as file:
                assert file.metadata.num_row_groups == 9
            continue
        with pytest.raises(InputError, match="a list of more than 8 items"), open_parquet(part):
            pass


def test_columns_nested_deeper_than_pyarrow_reads_are_refused(tmp_path):
    deep = pa.int8()
    for _ in range(2000):
        deep = pa.struct([("a", deep)])
    refused = pytest.raises(InputError, match="nested deeper")
    with refused, open_parquet(parquet(tmp_path, {}, deep)):
        pass


# ---- TFRecord ------------------------------------------------------------------------------------


def test_tfrecord_above_our_limit_is_refused_before_it_is_read(tmp_path):
    length = struct.pack("<Q", LARGEST_RECORD + 1)
    masked = tables._masked(length)
    (tmp_path / "a.tfrecord").write_bytes(length + struct.pack("<I", masked))
    with pytest.raises(InputError, match=r"a record of 1,073,741,825 bytes.*smaller records"):
        list(iter_tfrecord(Part(str(tmp_path), "a.tfrecord")))


# ---- CSV -----------------------------------------------------------------------------------------


def csv(folder: Path, text: str) -> Part:
    (folder / "t.csv").write_text(text, newline="")
    return Part(str(folder), "t.csv", title="t.csv")


@pytest.mark.parametrize(
    "text",
    [
        'image_id,user_id\na.jpg,"' + "x" * (3 * LARGEST_ROW) + "\nb.jpg,bob\n" * 2,
        "x" * (3 * LARGEST_ROW) + ",image_id,user_id\na,b,c\n",
    ],
)
def test_csv_row_above_our_limit_is_refused(tmp_path, text):
    part = csv(tmp_path, text)
    refused = pytest.raises(InputError, match=r"a row of more than 16,777,216 bytes.*quote")
    with refused, open_csv(part, ["user_id"]) as reader:
        list(reader)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("odd", ["Zoë,a,b", "a,b,Zoë,c", "Zoë"])
def test_only_the_invalid_utf_8_row_is_skipped(tmp_path, odd):
    """One record of one user never decides whether the table is read."""
    rows = ["käse,user_id", "ä.jpg,ada", odd, "b.jpg,Zoë"]
    head, *rest = rows
    data = head.encode() + b"\n" + "\n".join(rest).encode("latin-1")
    (tmp_path / "t.csv").write_bytes(b"\xef\xbb\xbf" + data)
    part, skipped = Part(str(tmp_path), "t.csv", title="t.csv"), list[str]()
    with open_csv(part, ["user_id", "käse"], skipped.append) as table:
        found = [row for block in table for row in block.to_pylist()]
    assert [row["user_id"] for row in found] == [b"ada", b"Zo\xeb"]
    assert [row["käse"] for row in found] == [b"\xe4.jpg", b"b.jpg"]
    assert skipped == [odd]
    assert lines_in_quotes(part) == 0


@pytest.mark.long
@pytest.mark.parametrize("character", ["x", "\xeb", "€"])
def test_row_up_to_our_limit_is_read_in_any_encoding(tmp_path, character):
    encoding = "utf-8" if character == "€" else "latin-1"
    long = character * ((LARGEST_ROW - 100) // len(character.encode(encoding)))
    text = f"image_id,user_id\n{long},ada\nb.jpg,bo\n"
    (tmp_path / "t.csv").write_bytes(text.encode(encoding))
    with open_csv(Part(str(tmp_path), "t.csv"), ["user_id"]) as table:
        assert [row["user_id"] for block in table for row in block.to_pylist()] == [b"ada", b"bo"]


@pytest.mark.parametrize(
    ("rows", "lines"),
    [
        (["a.jpg,ada,one", "", "b.jpg,bob,two"], 0),
        (["a.jpg,ada,'one", "b.jpg,bob,two", "c.jpg,cy,three"], 2),
        (["a.jpg,ada,'one", "b.jpg,bob,two'", "c.jpg,cy,three"], 1),
        (["a.jpg,ada,'one", "b.jpg,bob,'two'", "odd", "c.jpg,cy,three"], 1),
        (["a.jpg,Smith, jr,one"], 0),
    ],
)
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_lines_inside_quotes_are_counted(tmp_path, rows, lines, end):
    text = end.join(["image_id,user_id,caption", *rows, ""]).replace("'", '"')
    assert lines_in_quotes(csv(tmp_path, text)) == lines


# ---- numbers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", ["1" * 5000 + ".0", Decimal("1e9999"), Decimal("-1e9999")])
def test_user_id_number_with_too_many_digits_is_inexact(number):
    assert name_text(number) is None
    assert name_problem(number) == "user_id_inexact"


# ---- A file of any size among the photos is a bad record: it is bounded before it is read ----


HUGE = 30 << 30


def sparse(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"\xff\xd8\xff")
    os.truncate(path, HUGE)


@pytest.fixture
def folder(tmp_path):
    for user in range(4):
        for number in range(3):
            path = tmp_path / "in" / f"user {user}" / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(picture(10 * user + number))
    sparse(tmp_path / "in" / "user 1" / "film.png")
    return tmp_path / "in"


def test_check_data_counts_a_huge_file(folder, tmp_path):
    found = check(make_config(str(folder)))
    (bad,) = found.bad
    assert "more than" in bad[0]
    assert bad[1] == 1
    assert found.used == 12


def test_embed_gives_a_huge_file_a_row_with_its_reason(folder):
    source = PhotoSource(str(folder))
    (read,) = decoded(source.photos(), PhotoReader(8, 1))
    reasons = dict(zip(read.names, read.reasons, strict=True))
    assert reasons.pop("user 1/film.png") == "file_too_large"
    assert set(reasons.values()) == {None}


def test_image_bytes_are_limited(monkeypatch):
    data = encoded(Image.new("L", (8, 8)))
    assert PhotoReader(8, 1).read(data).shape == (8, 8, 1)
    monkeypatch.setattr(photos, "MAX_BYTES", 10)
    with pytest.raises(BadImageError, match="file_too_large"):
        PhotoReader(8, 1).read(data)


def test_image_file_above_the_byte_limit_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(image_files, "MAX_BYTES", 10)
    (tmp_path / "a.png").write_bytes(bytes(11))
    with pytest.raises(BadImageError, match="file_too_large"):
        ImageFiles(str(tmp_path)).read("a.png")
    assert MAX_BYTES < 1 << 30


# ---- Canonical images: what goes in, what comes out, and that everybody can read it ----


PHOTOS = list(hostile_photos())


def noise(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, shape, np.uint8)


@given(st.integers(1, 80), st.sampled_from([1, 3]), st.integers(0, 9), st.booleans())
@settings(max_examples=40, deadline=None)
def test_canonical_png_round_trips_through_our_reader_and_pillow(
    size: int, channels: int, seed: int, drawn: bool
) -> None:
    pixels = np.random.default_rng(seed).integers(0, 256, (size, size, channels), np.uint8)
    pixels //= 255 if drawn else 8
    data = encode_png(pixels)
    if pixels.size > 4096:
        assert (len(data) < pixels.size) == drawn  # photos are not compressed
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
def test_stored_image_that_is_not_a_canonical_png_is_an_artifact_error(bad: bytes | None) -> None:
    damaged = bytearray(encode_png(noise(8, 8, 1)))
    damaged[45:50] = b"xxxxx"
    with pytest.raises(ArtifactError, match="partition_users"):
        decode_pngs([bytes(damaged) if bad is None else bad], 8, 1)


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
def test_every_image_encoding_is_decoded_correctly(photo: HostilePhoto, channels: int) -> None:
    seen = Image.fromarray(photo.pixels).convert("L" if channels == 1 else "RGB")
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
def test_hostile_bytes_raise_only_expected_errors(junk: bytes, place: int, value: int) -> None:
    damaged = bytearray(encode_png(noise(8, 8, 1)))
    damaged[place % len(damaged)] = value
    for data in (junk, bytes(damaged), bytes(damaged) + junk):
        with suppress(BadImageError):
            assert PhotoReader(8, 1).read(data).shape == (8, 8, 1)


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
