"""Every kind of source gives the same users; real images come through."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fedemb.config import SourceConfig
from fedemb.data.photos import PhotoReader
from fedemb.data.records import encode_example
from fedemb.data.sources import find_parts, read_public_images
from tests.kit.pipeline_runs.partition_run import Partitioner, rows_of, tfrecord


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
