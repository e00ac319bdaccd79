"""Every kind of source gives the same users; real images come through."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fedemb.config import SourceConfig
from fedemb.data.identity import name_problem, name_text
from fedemb.data.photos import PhotoReader
from fedemb.data.records import encode_example, example_class
from fedemb.data.sources import read_public_images
from fedemb.partition.check import check
from fedemb.partition.transforms import _as_bytes
from tests.kit.pipeline_runs.partition_run import (
    Partitioner,
    make_config,
    picture,
    rows_of,
    tfrecord,
    user_key,
)


def write_tfrecord(path: Path, records: list[bytes]) -> str:
    data = tfrecord(records)
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return str(path)


def example(row: dict[str, Any]) -> bytes:
    columns = {"image": [row["image"]]}
    columns |= {name: [row[name].encode()] for name in ("user_id", "label")}
    return encode_example(columns)


def same_users(left: Any, right: Any) -> bool:
    kinds = ("users", "evaluation")
    return all(left.records(kind) == right.records(kind) for kind in kinds)


STRANGE = ("\u5c71\u7530\u3000\u592a\u90ce", "CORP\\ada", "no\u00a0break")
"""Names of folders that a laptop has and a bucket refuses."""


def test_folder_of_any_unicode_name_is_a_user_with_photos_at_any_depth(
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


def test_public_images_are_read_with_their_classes(data_dir: Path) -> None:
    source = SourceConfig(
        uri=str(data_dir / "signdigits.parquet"), where={"split": ("test",)}, label_scope="global"
    )
    images, labels = read_public_images(source, PhotoReader(32, 3))
    assert images.shape[1:] == (32, 32, 3)
    assert len(images) == len(labels) > 100
    assert len(set(labels.tolist())) == 10


# ---- Ids as exports of other tools write them ----


ALL_TRAIN = {"partition__evaluation": {"by": "hash", "fraction": 1e-9}}


def csv_shards(folder: Path, users: int) -> str:
    """January has whole ids; in February one id was missing, so pandas wrote decimals."""
    (folder / "img").mkdir(parents=True)
    shards = {"jan": "{}", "feb": "{}.0"}
    for number, (name, form) in enumerate(shards.items()):
        lines = ["image_id,user_id,label"]
        for user in range(1, users + 1):
            photo = f"img/{name}-{user}.png"
            (folder / photo).write_bytes(picture(2 * user + number))
            lines.append(f"{photo},{form.format(user)},a")
        (folder / f"{name}.csv").write_text("\n".join(lines) + "\n")
    return str(folder / "*.csv")


def sizes(result: Any) -> dict[Any, int]:
    return {key: len(record.images) for key, record in result.records().items()}


def test_whole_and_decimal_ids_of_two_csv_files_are_one_user(
    partition: Partitioner, tmp_path: Path
) -> None:
    uri = csv_shards(tmp_path / "in", 6)
    result = partition(uri, data__source__format="csv", **ALL_TRAIN)
    assert sizes(result) == {user_key(str(user)): 2 for user in range(1, 7)}
    found = check(make_config(uri, data__source__format="csv"))
    assert [
        text for text in found.warnings if "6 records with a user id written as a decimal" in text
    ]


def of_ids(path: Path, ids: list[Any]) -> str:
    """A TFRecord file with an image of each id, in the feature that its type has."""
    records = []
    for number, value in enumerate(ids):
        example = example_class()()
        feature = example.features.feature
        feature["image"].bytes_list.value.append(picture(number))
        feature["label"].bytes_list.value.append(b"a")
        kind = {bytes: "bytes_list", float: "float_list", int: "int64_list"}[type(value)]
        getattr(feature["user_id"], kind).value.append(value)
        records.append(example.SerializeToString())
    path.write_bytes(tfrecord(records))
    return str(path)


def parquet(path: Path, ids: pa.Array) -> str:
    images = [picture(number) for number in range(len(ids))]
    pq.write_table(pa.table({"image": images, "user_id": ids, "label": ["a"] * len(ids)}), path)
    return str(path)


@pytest.mark.long
def test_types_of_all_formats_give_the_same_user(partition: Partitioner, tmp_path: Path) -> None:
    raw = of_ids(tmp_path / "a.tfrecord", [7, 7.0, b"7", b"7.0"])
    assert sizes(partition(raw, **ALL_TRAIN)) == {user_key("7"): 4}
    kinds = (pa.int64(), pa.float64(), pa.float32(), pa.decimal128(21, 2), pa.string())
    for number, kind in enumerate(kinds):
        uri = parquet(tmp_path / f"{number}.parquet", pa.array([7, 7]).cast(kind))
        assert sizes(partition(uri, **ALL_TRAIN)) == {user_key("7"): 2}, kind


@pytest.mark.parametrize(
    ("kind", "ids"),
    [
        (pa.float64(), [1234567890123456700.0, 1234567890123456701.0]),
        (pa.float32(), [16777216.0, 16777217.0]),
        (pa.string(), ["1.23457E+11", "1.2345678901234568e+18"]),
    ],
)
def test_decimal_ids_that_lost_digits_are_left_out_and_refused_before_a_run(
    partition: Partitioner, tmp_path: Path, kind: pa.DataType, ids: list[Any]
) -> None:
    uri = parquet(tmp_path / "a.parquet", pa.array([*ids, None], kind))
    result = partition(uri, **ALL_TRAIN)
    assert not result.records()
    assert result.counts["user_id_inexact"] == 2
    assert result.counts["user_id_missing"] == 1
    found = check(make_config(uri))
    assert any("2**53 = 9007199254740992" in text for text in found.problems)


@pytest.mark.parametrize("value", [7, 7.0, 7.5, float(2**60), -3, b"7.0", b"\xff", None])
def test_encoded_values_keep_their_text_and_problem(value: Any) -> None:
    handed = _as_bytes(value)
    assert name_text(handed) == name_text(value)
    if name_text(value) is None:
        assert name_problem(handed) == name_problem(value)
