"""Files as other tools write them: what `fedemb init` makes of each."""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from fedemb.data.image_files import ImageFiles
from fedemb.data.photos import BadImageError
from fedemb.data.records import encode_example
from fedemb.data.tables import Part, iter_tfrecord
from fedemb.errors import ConfigError, InputError
from fedemb.partition.check import check
from fedemb.pipelines.run.load_config import load_config
from tests.kit.cli import fedemb
from tests.kit.pipeline_runs.partition_run import tfrecord

CLASSES = ("cat", "dog", "owl")
USERS, EACH = 20, 3
TASK = ("--task", "classification", "--classes")


def photo(user: int, number: int) -> bytes:
    pixels = np.random.default_rng(131 * user + number).integers(0, 255, (48, 48, 3), np.uint8)
    sink = io.BytesIO()
    Image.fromarray(pixels).save(sink, "JPEG")
    return sink.getvalue()


def rows() -> Iterator[tuple[str, str, bytes]]:
    for user in range(USERS):
        for number in range(EACH):
            yield f"user-{user:02d}", CLASSES[number], photo(user, number)


def init(data: Path | str, folder: Path, *more: str) -> str:
    (folder / "made.yaml").unlink(missing_ok=True)
    words = ["init", "--data", str(data), "-o", str(folder / "made.yaml"), "--users-lower-bound"]
    words += ["15", "--public", "none", "--epsilon", "8", *(more or ("--alike=user",))]
    return fedemb(*words)


def users_of(data: Path | str, folder: Path, *more: str) -> int:
    (line,) = [line for line in init(data, folder, *more).splitlines() if " usable user" in line]
    return int(line.partition("; ")[2].partition(" usable")[0])


def as_parquet(path: Path, **columns: pa.Array) -> Path:
    users, labels, images = zip(*rows(), strict=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    table = {"image": list(images), "user_id": list(users), "label": list(labels), **columns}
    pq.write_table(pa.table(table), path)
    return path


def examples() -> list[bytes]:
    return [
        encode_example({"image": [data], "user_id": [user.encode()], "label": [label.encode()]})
        for user, label, data in rows()
    ]


# ---- TFRecord ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "glob"),
    [
        ("ds-train.tfrecord-{:05d}-of-00002", "ds-train.tfrecord-*"),
        ("data_tfrecord-{:05d}-of-00002.gz", "data_tfrecord-*.gz"),
        ("data_tfrecord-{:05d}-of-00002", "data_tfrecord-?????-of-00002"),
        ("part-{}.tfrecords", "*.tfrecords"),
    ],
)
def test_shards_named_as_by_tfx_and_tfds_are_read(tmp_path, form, glob):
    folder = tmp_path / "in"
    folder.mkdir()
    pack = gzip.compress if form.endswith(".gz") else bytes
    for shard in range(2):
        (folder / form.format(shard)).write_bytes(pack(tfrecord(examples()[shard::2])))
    assert users_of(folder / glob, tmp_path) == USERS


@pytest.mark.parametrize("name", ["a.tfrecord", "a.tfrecord.gz"])
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_tfrecord_compression_is_detected_by_magic_bytes(tmp_path, pack, name):
    (tmp_path / name).write_bytes(pack(tfrecord(examples()[:3])))
    assert list(iter_tfrecord(Part(str(tmp_path), name))) == examples()[:3]


def test_uncompressed_tfrecord_that_starts_like_gzip_is_read(tmp_path):
    record = bytes(0x8B1F)
    (tmp_path / "a.tfrecord").write_bytes(tfrecord([record]))
    assert (tmp_path / "a.tfrecord").read_bytes()[:2] == b"\x1f\x8b"
    assert list(iter_tfrecord(Part(str(tmp_path), "a.tfrecord"))) == [record]


@pytest.mark.parametrize("pack", [bytes, gzip.compress, zlib.compress])
@pytest.mark.parametrize("cut", [1, 5, 40])
def test_truncated_shard_is_an_error_in_every_format(tmp_path, pack, cut):
    (tmp_path / "a.tfrecord").write_bytes(pack(tfrecord(examples()[:3]))[:-cut])
    with pytest.raises(InputError, match="not a whole TFRecord"):
        list(iter_tfrecord(Part(str(tmp_path), "a.tfrecord")))


# ---- Parquet -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["dictionary", "view", "large", "struct"])
def test_image_columns_of_every_binary_type_are_read(tmp_path, kind):
    images = [data for _, _, data in rows()]
    column = {
        "dictionary": lambda: pa.array(images).dictionary_encode(),
        "view": lambda: pa.array(images, pa.binary_view()),
        "large": lambda: pa.array(images, pa.large_binary()),
        "struct": lambda: pa.array([{"bytes": data, "path": None} for data in images]),
    }[kind]()
    assert users_of(as_parquet(tmp_path / "a.parquet", image=column), tmp_path) == USERS


def test_user_id_in_the_path_as_spark_writes_it_is_read(tmp_path):
    for user, label, data in rows():
        path = tmp_path / "t.parquet" / f"user_id={user.replace('-', '%2D')}" / "0.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table({"image": [data], "label": [label]}), path)
    assert users_of(tmp_path / "t.parquet", tmp_path) == USERS


def hugging_face(path: Path) -> Path:
    labels = [CLASSES.index(label) for _, label, _ in rows()]
    table = pq.read_table(as_parquet(path, label=pa.array(labels)))
    features = {"label": {"names": list(CLASSES), "_type": "ClassLabel"}}
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    pq.write_table(table.replace_schema_metadata(metadata), path)
    return path


def test_names_of_classes_come_from_the_metadata_of_hugging_face(tmp_path):
    init(hugging_face(tmp_path / "hf.parquet"), tmp_path, *TASK, "cat,dog,owl")
    config = load_config(tmp_path / "made.yaml")
    assert config.data.source.label_names == CLASSES
    found = check(config)
    assert found.used == USERS * EACH


@pytest.mark.parametrize(
    ("labels", "says"),
    [
        ([CLASSES.index(label) for _, label, _ in rows()], "are 0,1,2"),
        ([label.upper() for _, label, _ in rows()], "--classes CAT,DOG,OWL"),
    ],
)
def test_list_of_classes_that_no_photo_has_is_refused_with_the_labels(tmp_path, labels, says):
    path = as_parquet(tmp_path / "a.parquet", label=pa.array(labels))
    with pytest.raises(ConfigError, match="classes cat, dog, owl") as refused:
        init(path, tmp_path, *TASK, "cat,dog,owl")
    assert says in str(refused.value)


# ---- paths ---------------------------------------------------------------------------------------


def as_csv(folder: Path, spelled) -> Path:
    (folder / "Bilder é").mkdir()
    lines = ["file_name,user_id"]
    for number, (user, _, data) in enumerate(rows()):
        (folder / "Bilder é" / f"{number}.jpg").write_bytes(data)
        lines.append(f"{spelled(f'Bilder é/{number}.jpg')},{user}")
    (folder / "t.csv").write_text("\n".join(lines) + "\n")
    return folder / "t.csv"


@pytest.mark.parametrize("form", ["./", "absolute", "file", "NFD", "backslash", "double", "bare"])
def test_image_paths_of_a_csv_are_found_in_every_spelling(tmp_path, form):
    import unicodedata

    ways = {
        "./": lambda name: f"./{name}",
        "absolute": lambda name: f"{tmp_path}/{name}",
        "file": lambda name: f"file://{tmp_path}/{name}",
        "NFD": lambda name: unicodedata.normalize("NFD", name),
        "backslash": lambda name: name.replace("/", "\\"),
        "double": lambda name: name.replace("/", "//"),
        "bare": lambda name: name.removesuffix(".jpg"),
    }
    assert users_of(as_csv(tmp_path, ways[form]), tmp_path) == USERS


@pytest.mark.parametrize(
    "name",
    ["/etc/hostname", "./../x", "a/../../x", "..\\x", "a\\..\\..\\x", "file:///etc/hostname"],
)
def test_image_names_cannot_leave_the_root(tmp_path, name):
    (tmp_path / "root" / "a").mkdir(parents=True)
    (tmp_path / "x").write_bytes(b"secret")
    with pytest.raises(BadImageError, match="image_missing"):
        ImageFiles(str(tmp_path / "root")).read(name)
