"""Every kind of source gives the same users; real images come through."""

from __future__ import annotations

import csv
import gzip
import struct
from pathlib import Path
from typing import Any

import google_crc32c
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fedemb.config import SourceConfig
from fedemb.data.photos import PhotoReader
from fedemb.data.records import encode_example, example_class
from fedemb.data.sources import find_parts, read_part, read_public_images
from fedemb.errors import InputError
from tests.kit.pipeline_runs.partition_run import Partitioner, picture, rows_of


def write_tfrecord(path: Path, records: list[bytes]) -> str:
    def masked(data: bytes) -> bytes:
        crc = google_crc32c.value(data)
        return struct.pack("<I", (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF)

    with gzip.open(path, "wb") if path.suffix == ".gz" else path.open("wb") as file:
        for record in records:
            length = struct.pack("<Q", len(record))
            file.write(length + masked(length) + record + masked(record))
    return str(path)


def example(row: dict[str, Any]) -> bytes:
    return encode_example(
        {
            "image": [row["image"]],
            "user_id": [row["user_id"].encode()],
            "label": [row["label"].encode()],
        }
    )


def same_users(left: Any, right: Any) -> bool:
    kinds = ("users", "evaluation")
    return all(left.records(kind) == right.records(kind) for kind in kinds)


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_tfrecords_give_the_users_of_parquet_and_bad_records_are_dropped(
    partition: Partitioner, tmp_path: Path, ending: str
) -> None:
    rows = rows_of(10)
    retyped = example_class()()  # the same feature with another type: a number as user id
    retyped.features.feature["image"].bytes_list.value.append(picture(77))
    retyped.features.feature["user_id"].int64_list.value.append(7)
    retyped.features.feature["label"].float_list.value.append(1.0)
    extra = {"image": picture(77), "user_id": "7", "label": "1"}
    records = [example(rows[0]), retyped.SerializeToString(), *map(example, rows[1:])]
    records += [b"\xff\xff no example", b"", encode_example({"user_id": [b"user 1"]})]
    address = write_tfrecord(tmp_path / f"rows.tfrecord{ending}", records)
    result = partition(address)
    assert same_users(result, partition([*rows, extra]))
    assert result.counts["user_id_missing"] == 2
    assert result.counts["label_missing"] == 1


def test_tfrecord_cut_in_the_middle_is_one_sentence(partition: Partitioner, tmp_path: Path) -> None:
    path = Path(write_tfrecord(tmp_path / "a.tfrecord", [example(row) for row in rows_of(3)]))
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(InputError, match="cut or damaged"):
        partition(str(path))


def test_image_folder_gives_one_user_and_class_per_folder(
    partition: Partitioner, tmp_path: Path
) -> None:
    rows = [{**row, "label": row["user_id"]} for row in rows_of(8)]
    for number, row in enumerate(rows):
        folder = tmp_path / "faces" / row["user_id"]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number}.png").write_bytes(row["image"])
    (tmp_path / "faces" / "user 1" / "scan.pcx").write_bytes(b"junk")
    (tmp_path / "faces" / "user 1" / "Thumbs.db").write_bytes(b"junk")
    (tmp_path / "faces" / ".hidden").mkdir()
    result = partition(str(tmp_path / "faces"))
    assert same_users(result, partition(rows))
    assert result.counts["not_decodable"] == 1
    assert result.counts["side_file"] == 1


def test_csv_mapping_finds_images_with_and_without_ending(
    partition: Partitioner, tmp_path: Path
) -> None:
    rows = rows_of(8)
    images = tmp_path / "images"
    (images / "a" / "b" / "c").mkdir(parents=True)
    lines = []
    for number, row in enumerate(rows):
        name = f"abc{number}"
        ending = (".png", ".jpg")[number % 2]
        folder = images / "a/b/c" if number % 3 == 0 else images
        (folder / f"{name}{ending}").write_bytes(row["image"])
        written = name if number % 2 else f"{name}{ending}"
        lines.append([row["user_id"], written, row["label"]])
    lines += [["eve", "../../etc/passwd", "x"], ["eve", "nothing", "x"], ["eve", "", "x"]]
    with (tmp_path / "map.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["user_id", "image_id", "class"], *lines, ["odd line"]])
    result = partition(
        str(tmp_path / "map.csv"),
        data__source__image_root=str(images),
        data__source__columns={"label": "class"},
    )
    assert same_users(result, partition(rows))
    assert result.counts["image_missing"] == 3
    assert result.counts["rows"] == len(lines) + 1


def test_line_of_a_csv_that_is_no_row_is_counted_whatever_where_says(
    partition: Partitioner, tmp_path: Path
) -> None:
    (tmp_path / "images").mkdir()
    rows = rows_of(4)
    lines = ["user_id,image_id,label,part"]
    for number, row in enumerate(rows):
        (tmp_path / "images" / f"{number}.png").write_bytes(row["image"])
        lines.append(f"{row['user_id']},{number}.png,{row['label']},a")
    lines += ["Smith, jr,0.png,x,a", "too short", "ada,0.png,x,b"]
    (tmp_path / "map.csv").write_text("\n".join(lines) + "\n")
    result = partition(
        str(tmp_path / "map.csv"),
        data__source__image_root=str(tmp_path / "images"),
        data__source__columns={"label": "label"},
        data__source__where={"part": ["a"]},
    )
    assert same_users(result, partition(rows))
    assert result.counts["rows"] == len(rows) + 2


STRANGE = ("\u5c71\u7530\u3000\u592a\u90ce", "CORP\\ada", "no\u00a0break")
"""Names of folders that a laptop has and a bucket refuses."""


def test_folder_with_any_name_is_a_user_and_a_photo_lies_as_deep_as_it_likes(
    partition: Partitioner, tmp_path: Path
) -> None:
    rows = rows_of(len(STRANGE))[: len(STRANGE)]
    wanted = []
    for row, name in zip(rows, STRANGE, strict=True):
        folder = tmp_path / "faces" / name / "2024" / "05"
        folder.mkdir(parents=True)
        (folder / "photo\u30001.png").write_bytes(row["image"])
        wanted.append({"image": row["image"], "user_id": name, "label": "2024/05"})
    for name in (f"{STRANGE[0]}/caf\udce9.png", "b\udce9/1.png"):  # no Unicode
        path = tmp_path / "faces" / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(rows[0]["image"])
    result = partition(str(tmp_path / "faces"))
    assert same_users(result, partition(wanted))
    assert result.counts["rows"] == len(STRANGE) + 2
    assert result.counts["image_missing"] == 2


@pytest.mark.parametrize(
    "names",
    [("a.tfrecords", "b.TFRECORD"), ("x.tfrecord-00000-of-00002", "x.tfrecord-00001-of-00002")],
)
def test_files_of_a_folder_count_by_every_ending_that_a_file_does(tmp_path: Path, names) -> None:
    for name in names:
        write_tfrecord(tmp_path / name, [])
        assert SourceConfig(uri=str(tmp_path / name)).file_format == "tfrecord"
    source = SourceConfig.model_validate({"uri": str(tmp_path), "format": "tfrecord"})
    assert [part.name for part in find_parts(source, [])] == sorted(
        f"{tmp_path.name}/{name}" for name in names
    )


def test_where_filters_and_huggingface_images_are_read(
    partition: Partitioner, tmp_path: Path
) -> None:
    rows = [{**row, "part": "ab"[n % 2]} for n, row in enumerate(rows_of(8))]
    table = pa.table(
        {
            "image": [{"bytes": row["image"], "path": "x.png"} for row in rows],
            **{name: [row[name] for row in rows] for name in ("user_id", "label", "part")},
        }
    )
    pq.write_table(table, tmp_path / "hub.parquet")
    result = partition(str(tmp_path / "hub.parquet"), data__source__where={"part": ["a"]})
    assert result.counts["rows"] == 12
    assert same_users(result, partition([row for row in rows if row["part"] == "a"]))


def test_globs_and_folders_of_files_are_found(tmp_path: Path) -> None:
    for name in ("b/2.parquet", "b/1.parquet", "c.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        pq.write_table(pa.table({"image": [b"x"], "user_id": ["a"]}), tmp_path / name)
    for address in (tmp_path / "b" / "*.parquet", tmp_path / "*" / "*.parquet", tmp_path / "b"):
        source = SourceConfig(uri=str(address), format="parquet")
        parts = find_parts(source, ["user_id"])
        assert [part.name.split("/")[-1] for part in parts] == ["1.parquet", "2.parquet"]
        assert [len(batch) for part in parts for batch in read_part(source, part, [])] == [1, 1]


def test_omniglot_alphabets_held_out_never_train(partition: Partitioner, data_dir: Path) -> None:
    source = str(data_dir / "omniglot_small.parquet")
    result = partition(
        source,
        data__source__columns={"user_id": "character", "label": None, "subgroup": "alphabet"},
        partition__evaluation={"by": "value", "column": "alphabet", "values": ["Greek", "Latin"]},
        model__image_size=28,
    )
    training, evaluation = result.records(), result.records("evaluation")
    assert {record.subgroup for record in evaluation.values()} == {"Greek", "Latin"}
    assert {r.subgroup for r in training.values()} == {"Balinese", "Early_Aramaic", "Korean"}
    assert len(training) + len(evaluation) == 136
    assert {len(record.images) for record in training.values()} == {20}
    assert all(len(set(record.labels)) == 1 for record in training.values())


def test_public_images_are_read_with_dense_labels(data_dir: Path) -> None:
    source = SourceConfig(
        uri=str(data_dir / "signdigits.parquet"), where={"split": ("test",)}, label_scope="global"
    )
    images, labels = read_public_images(source, PhotoReader(32, 3))
    assert images.shape[1:] == (32, 32, 3)
    assert len(images) == len(labels) > 100
    assert set(labels.tolist()) == set(range(10))
