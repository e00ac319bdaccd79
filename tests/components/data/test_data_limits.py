"""Limits of the libraries that read files: ours decide, and messages name them."""

from __future__ import annotations

import io
import struct
import warnings
from decimal import Decimal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image, PngImagePlugin

from fedemb.data import photos, tables
from fedemb.data.identity import name_problem, name_text
from fedemb.data.photos import BadImageError, PhotoReader
from fedemb.data.tables import (
    LARGEST_RECORD,
    LARGEST_ROW,
    Part,
    iter_tfrecord,
    lines_in_quotes,
    open_csv,
    open_parquet,
)
from fedemb.errors import InputError
from tests.components.partition_users.test_partition_sources import write_tfrecord

PIXELS = np.random.default_rng(0).integers(0, 255, (48, 48, 3), np.uint8)


def png(**options: object) -> bytes:
    sink = io.BytesIO()
    Image.fromarray(PIXELS).save(sink, "PNG", **options)
    return sink.getvalue()


def with_text(size: int, kind: str) -> bytes:
    info = PngImagePlugin.PngInfo()
    if kind == "profile":
        return png(icc_profile=bytes(size))
    (info.add_text if kind == "text" else info.add_itxt)("Comment", "x" * size, zip=True)
    return png(pnginfo=info)


# ---- photos --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["text", "international text", "profile"])
def test_photo_with_more_text_than_pillow_reads_is_read(kind):
    read = PhotoReader(48, 3).read(with_text(3 << 20, kind))
    np.testing.assert_array_equal(read, PIXELS)


@pytest.mark.parametrize("kind", ["text", "international text", "profile"])
def test_text_above_our_limit_is_named_as_the_reason(kind):
    with pytest.raises(BadImageError, match="text_too_large"):
        PhotoReader(48, 3).read(with_text(photos.MAX_TEXT_BYTES + 1, kind))


def test_max_pixels_decides_above_the_limit_of_pillow(monkeypatch):
    sink = io.BytesIO()
    Image.new("1", (1500, 1000)).save(sink, "PNG")
    for limit, read in ((2_000_000, True), (1_400_000, False)):
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 500_000)  # an error from 1,000,000 on
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            monkeypatch.setattr(photos, "MAX_PIXELS", limit)
            reader = PhotoReader(8, 1)
            if read:
                assert reader.read(sink.getvalue()).shape == (8, 8, 1)
            else:
                with pytest.raises(BadImageError, match="too_many_pixels"):
                    reader.read(sink.getvalue())


def test_max_pixels_decides_where_pillow_has_no_limit(monkeypatch):
    sink = io.BytesIO()
    Image.new("1", (1500, 1000)).save(sink, "PNG")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    monkeypatch.setattr(photos, "MAX_PIXELS", 1_400_000)
    with pytest.raises(BadImageError, match="too_many_pixels"):
        PhotoReader(8, 1).read(sink.getvalue())


# ---- Parquet -------------------------------------------------------------------------------------


def parquet(folder: Path, metadata: dict[str, str], kind: pa.DataType | None = None) -> Part:
    table = pa.table({"image": [b"x"], "user_id": ["a"], "n": pa.nulls(1, kind or pa.int8())})
    pq.write_table(table.replace_schema_metadata(metadata), folder / "a.parquet")
    return Part(str(folder), "a.parquet", said="a.parquet")


@pytest.mark.long
def test_parquet_with_more_metadata_than_pyarrow_reads_is_read(tmp_path):
    with open_parquet(parquet(tmp_path, {"big": "x" * (101 << 20)})) as file:
        assert file.metadata.num_rows == 1


def test_parquet_metadata_above_our_limit_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "LARGEST_TEXT", 1 << 20)
    refused = pytest.raises(InputError, match="a text of more than 1,048,576 bytes")
    with refused, open_parquet(parquet(tmp_path, {"big": "x" * (2 << 20)})):
        pass


def test_list_of_parquet_above_our_limit_is_named(tmp_path, monkeypatch):
    pq.write_table(pa.table({"n": range(9)}), tmp_path / "a.parquet", row_group_size=1)
    part = Part(str(tmp_path), "a.parquet", said="a.parquet")
    for limit, read in ((9, True), (8, False)):
        monkeypatch.setattr(tables, "MOST_ITEMS", limit)
        if read:
            with open_parquet(part) as file:
                assert file.metadata.num_row_groups == 9
            continue
        with pytest.raises(InputError, match="a list of more than 8 items"), open_parquet(part):
            pass


def test_columns_nested_deeper_than_pyarrow_reads_are_named(tmp_path):
    deep = pa.int8()
    for _ in range(2000):
        deep = pa.struct([("a", deep)])
    refused = pytest.raises(InputError, match="nested deeper")
    with refused, open_parquet(parquet(tmp_path, {}, deep)):
        pass


# ---- TFRecord ------------------------------------------------------------------------------------


def test_record_above_our_limit_is_named_before_it_is_read(tmp_path):
    length = struct.pack("<Q", LARGEST_RECORD + 1)
    masked = tables._masked(length)
    (tmp_path / "a.tfrecord").write_bytes(length + struct.pack("<I", masked))
    with pytest.raises(InputError, match=r"a record of 1,073,741,825 bytes.*smaller records"):
        list(iter_tfrecord(Part(str(tmp_path), "a.tfrecord")))


def test_record_that_is_cut_is_not_said_to_be_large(tmp_path):
    path = Path(write_tfrecord(tmp_path / "a.tfrecord", [b"x" * 100]))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(InputError, match="cut or damaged"):
        list(iter_tfrecord(Part(str(tmp_path), "a.tfrecord")))


# ---- CSV -----------------------------------------------------------------------------------------


def csv(folder: Path, text: str) -> Part:
    (folder / "t.csv").write_text(text, newline="")
    return Part(str(folder), "t.csv", said="t.csv")


@pytest.mark.parametrize(
    "text",
    [
        'image_id,user_id\na.jpg,"' + "x" * (3 * LARGEST_ROW) + "\nb.jpg,bob\n" * 2,
        "x" * (3 * LARGEST_ROW) + ",image_id,user_id\na,b,c\n",
    ],
)
def test_row_above_our_limit_is_named(tmp_path, text):
    part = csv(tmp_path, text)
    refused = pytest.raises(InputError, match=r"a row of more than 16,777,216 bytes.*quote")
    with refused, open_csv(part, ["user_id"]) as reader:
        list(reader)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("odd", ["Zoë,a,b", "a,b,Zoë,c", "Zoë"])
def test_row_that_is_not_utf_8_and_not_a_row_is_skipped_alone(tmp_path, odd):
    """One record of one user never decides whether the table is read."""
    rows = ["käse,user_id", "ä.jpg,ada", odd, "b.jpg,Zoë"]
    head, *rest = rows
    data = head.encode() + b"\n" + "\n".join(rest).encode("latin-1")
    (tmp_path / "t.csv").write_bytes(b"\xef\xbb\xbf" + data)
    part, skipped = Part(str(tmp_path), "t.csv", said="t.csv"), list[str]()
    with open_csv(part, ["user_id", "käse"], skipped.append) as table:
        found = [row for block in table for row in block.to_pylist()]
    assert [row["user_id"] for row in found] == [b"ada", b"Zo\xeb"]
    assert [row["käse"] for row in found] == [b"\xe4.jpg", b"b.jpg"]
    assert skipped == [odd]
    assert lines_in_quotes(part) == 0


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
def test_number_with_more_digits_than_python_converts_is_no_name(number):
    assert name_text(number) is None
    assert name_problem(number) == "user_id_inexact"
