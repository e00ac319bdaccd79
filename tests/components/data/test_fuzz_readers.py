"""Fuzzes each reader: damaged files are an error in one sentence, or records that are counted."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from fedemb.config import SourceConfig
from fedemb.data.columns import guess_source
from fedemb.data.identity import Hasher, name_problem, name_text
from fedemb.data.image_files import BadRecord
from fedemb.data.photos import BadImageError
from fedemb.data.sources import Batch, find_parts, image_files, read_part, split_part
from fedemb.errors import ConfigError, InputError
from fedemb.partition.prepare import Preparer
from tests.components.partition_users.test_partition_sources import example as tf_example
from tests.components.partition_users.test_partition_sources import write_tfrecord
from tests.kit.pipeline_runs.partition_run import KEY, make_config, rows_of, write_parquet

QUICK, LONG = 25, 400
COLUMNS = ["user_id", "label"]
Write = Callable[[Path], str]

short = settings(
    max_examples=QUICK,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    derandomize=True,
)
"""The same examples in each run of CI; `long` tries new ones."""
long = settings(short, max_examples=LONG, derandomize=False)


def write_folder(folder: Path) -> str:
    for number, row in enumerate(rows_of(3)):
        path = folder / "photos" / row["user_id"] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(row["image"])
    return "photos"


def write_csv(folder: Path) -> str:
    lines = ["image_id,user_id,label,caption"]
    for number, row in enumerate(rows_of(3)):
        (folder / f"{number}.png").write_bytes(row["image"])
        lines.append(f'{number}.png,{row["user_id"]},"{row["label"]}","a ""b""\n, c"')
    (folder / "t.csv").write_text("\r\n".join(lines))
    return "t.csv"


def write_rows(folder: Path) -> str:
    return Path(write_parquet(folder / "t.parquet", rows_of(3))).name


def write_records(folder: Path) -> str:
    return Path(write_tfrecord(folder / "t.tfrecord", [tf_example(row) for row in rows_of(3)])).name


def write_packed_records(folder: Path) -> str:
    return Path(
        write_tfrecord(folder / "t.tfrecord.gz", [tf_example(row) for row in rows_of(3)])
    ).name


def write_tar(folder: Path, mode: str = "w", name: str = "t.tar") -> str:
    with tarfile.open(folder / name, mode) as archive:
        for number, row in enumerate(rows_of(3)):
            values = {"user_id": row["user_id"], "label": row["label"]}
            for ending, data in (("png", row["image"]), ("json", json.dumps(values).encode())):
                info = tarfile.TarInfo(f"{'long ' * 30}{number}.{ending}")
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
    return name


def write_packed_tar(folder: Path) -> str:
    return write_tar(folder, "w:gz", "t.tar.gz")


WRITERS = (
    *(write_csv, write_rows, write_records, write_packed_records),
    *(write_tar, write_packed_tar),
)


@cache
def written(write: Write) -> bytes:
    """Returns the file that a writer makes."""
    with tempfile.TemporaryDirectory() as folder:
        return (Path(folder) / write(Path(folder))).read_bytes()


@st.composite
def damages(draw: st.DrawFn) -> Callable[[bytes], bytes]:
    """Functions that cut, overwrite, repeat and insert bytes."""
    kinds = st.sampled_from(["cut", "flip", "insert", "repeat", "drop", "zero"])
    steps = draw(
        st.lists(st.tuples(kinds, st.floats(0, 1), st.binary(min_size=1, max_size=12)), max_size=4)
    )

    def damage(data: bytes) -> bytes:
        for kind, where, junk in steps:
            place = int(where * len(data))
            head, tail = data[:place], data[place:]
            data = {
                "cut": head,
                "flip": head + junk + tail[len(junk) :],
                "insert": head + junk + tail,
                "repeat": head + tail[: 40 * len(junk)] + tail,
                "drop": head + tail[len(junk) :],
                "zero": head + bytes(len(junk)) + tail[len(junk) :],
            }[kind]
        return data

    return damage


def batches(source: SourceConfig) -> Iterator[Batch]:
    for part in find_parts(source, COLUMNS):
        for piece in split_part(part):
            yield from read_part(source, piece, COLUMNS)


def read_and_prepare(uri: Path | str, **more: object) -> int:
    """Reads a source as a run does, and returns its number of records; each is accounted for."""
    config = make_config(str(uri))
    source = config.data.source.model_copy(update=more)
    config = config.model_copy(update={"data": config.data.model_copy(update={"source": source})})
    preparer = Preparer(config, Hasher(KEY), None, frozenset().__contains__)
    rows = 0
    for batch in batches(source):
        assert {len(values) for values in batch.columns.values()} <= {len(batch)}
        prepared = preparer.prepare(batch)
        kept = sum(part[4] + part[5] for part in prepared.parts.values())
        dropped = sum(
            count
            for name, count in prepared.counts.items()
            if name not in ("rows", "user_id_as_decimal")
        )
        assert kept + dropped == len(batch) == prepared.counts["rows"]
        rows += len(batch)
    return rows


@contextmanager
def one_sentence(*errors: type[Exception]) -> Iterator[None]:
    """Accepts an error of these types in one line."""
    with suppress(*errors):
        try:
            yield
        except errors as error:
            lines = str(error).splitlines()
            if len(lines) != 1:
                raise AssertionError(lines) from error
            raise


@contextmanager
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="fuzz-"))
    try:
        yield path
    finally:
        shutil.rmtree(path)


def damaged_file(write: Write, damage: Callable[[bytes], bytes]) -> None:
    with folder() as path:
        name = write(path)
        (path / name).write_bytes(damage(written(write)))
        for use in (read_and_prepare, lambda uri: guess_source(str(uri), {})):
            with one_sentence(InputError, ConfigError):
                use(path / name)


@pytest.mark.parametrize("name", [b"image", b"user_id", b"label"])
def test_column_whose_name_is_not_utf_8_is_a_sentence(tmp_path, name):
    data = written(write_rows).replace(name, name[:2] + b"\xff" + name[3:])
    (tmp_path / "t.parquet").write_bytes(data)
    for use in (read_and_prepare, lambda uri: guess_source(str(uri), {})):
        with pytest.raises(InputError, match=r"name is not UTF-8 text\. Rename the column"):
            use(tmp_path / "t.parquet")


@pytest.mark.parametrize("write", WRITERS)
@given(damage=damages())
@short
def test_damaged_file_is_a_sentence_or_counted(write, damage):
    damaged_file(write, damage)


# ---- contents ------------------------------------------------------------------------------------

CELL = st.one_of(
    st.text(alphabet='ab,"\n\r\t;é\x00 ', max_size=6),
    st.sampled_from(["0.png", "1.0", "../0.png", '"', '"a', 'b"', "", " ", "NaN", "null", "1e17"]),
)


def table_of_cells(rows: list[list[str]], encoding: str) -> None:
    """Every line below the header is a record, or is said to be inside quotes."""
    with folder() as path:
        (path / "0.png").write_bytes(rows_of(1)[0]["image"])
        text = "image_id,user_id,label\n" + "\n".join(map(",".join, rows)) + "\n"
        (path / "t.csv").write_bytes(text.encode(encoding))
        lines = [line for line in text.encode(encoding).split(b"\n")[1:] if line.strip(b"\r")]
        if b"\r" in text.replace("\r\n", "\n").encode():
            lines = lines[:0]  # a return alone is a line end for some readers
        try:
            found = read_and_prepare(path / "t.csv")
        except InputError:
            return
        assert found >= min(len(lines), _least(text)) or not lines


def _least(text: str) -> int:
    """Lines below the header, without breaks at the ends of a quoted value, which are trimmed."""
    rows = list(csv.reader(io.StringIO(text, newline="")))[1:]
    return sum(1 + sum(cell.strip().count("\n") for cell in row) for row in rows if row)


TABLES = st.lists(st.lists(CELL, min_size=1, max_size=4), max_size=6)


@given(rows=TABLES, encoding=st.sampled_from(["utf-8", "latin-1"]))
@example(rows=[["", '"'], ['"', ""]], encoding="utf-8")
@short
def test_no_line_of_a_table_is_lost(rows, encoding):
    table_of_cells(rows, encoding)


NAMES = st.one_of(
    st.text(alphabet="ab./_é\n- ", min_size=1, max_size=12),
    st.sampled_from(
        ["0.png", "0.json", "0.PNG", "0.user_id", "1.png", "a/0.png", "/0.png", "../x.png"]
    ),
)
KINDS = st.sampled_from([tarfile.REGTYPE] * 6 + [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE])
CONTENTS = st.one_of(
    st.binary(max_size=20),
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=4),
        lambda inner: (
            st.lists(inner, max_size=2)
            | st.dictionaries(st.sampled_from(["user_id", "label", "x"]), inner, max_size=3)
        ),
        max_leaves=4,
    ).map(lambda value: json.dumps(value).encode()),
)
MEMBERS = st.lists(st.tuples(NAMES, KINDS, CONTENTS), max_size=8)


def archive_of_members(members: list[tuple[str, bytes, bytes]], dialect: int) -> None:
    """Every member of a whole archive is part of a record."""
    with folder() as path:
        wanted = 0
        with tarfile.open(path / "t.tar", "w", format=dialect) as archive:
            for name, kind, data in members:
                info = tarfile.TarInfo(name)
                info.type, info.linkname = kind, "x"
                info.size = len(data) if kind == tarfile.REGTYPE else 0
                try:
                    archive.addfile(info, io.BytesIO(data))
                except (ValueError, UnicodeError):  # the dialect cannot hold the name
                    continue
                wanted += kind != tarfile.DIRTYPE
        found = read_and_prepare(path / "t.tar")
        assert (found > 0) == (wanted > 0)
        assert found <= wanted


DIALECTS = st.sampled_from([tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])


@given(members=MEMBERS, dialect=DIALECTS)
@short
def test_members_of_any_name_and_kind_are_records(members, dialect):
    archive_of_members(members, dialect)


PARTS = st.binary(min_size=1, max_size=8).filter(
    lambda name: b"/" not in name and b"\0" not in name and name not in (b".", b"..")
)
TREES = st.lists(
    st.tuples(
        st.lists(PARTS, min_size=1, max_size=4), st.sampled_from(["photo", "junk", "link", "pipe"])
    ),
    max_size=6,
)


def tree_of_files(files: list[tuple[list[bytes], str]]) -> None:
    with folder() as path:
        root = path / "in"
        root.mkdir()
        for parts, kind in files:
            name = root.joinpath(*map(os.fsdecode, parts))
            try:
                name.parent.mkdir(parents=True, exist_ok=True)
                if name.is_symlink() or name.exists():
                    continue
                if kind == "link":
                    name.symlink_to(root)
                elif kind == "pipe":
                    os.mkfifo(name)
                else:
                    name.write_bytes(rows_of(1)[0]["image"] if kind == "photo" else b"junk")
            except OSError:  # a file is where a folder is to be
                continue
        with one_sentence(InputError):
            read_and_prepare(root)
            guess_source(str(root), {})


@given(files=TREES)
@short
def test_folder_of_any_names_and_kinds_is_read(files):
    tree_of_files(files)


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.decimals(),
    st.text(),
    st.binary(),
    st.lists(st.integers(), max_size=2),
    st.from_regex(r"-?[0-9]{1,30}(\.0+)?([eE][+-]?[0-9]{1,3})?", fullmatch=True),
)


@pytest.mark.long
@given(value=VALUES)
@settings(max_examples=500, deadline=None)
def test_any_value_is_one_name_or_has_a_reason(value):
    name = name_text(value)
    assert name_problem(value) if name is None else name_text(name) == name


@given(name=st.text(max_size=12))
@short
def test_name_of_an_image_in_a_table_never_raises_anything_else(tmp_path, name):
    files = image_files(SourceConfig(uri=str(tmp_path / "t.csv"), image_root=str(tmp_path)))
    assert files is not None
    with pytest.raises(BadImageError):
        files.read(name)
    with pytest.raises(BadImageError, match="why"):
        files.read(BadRecord("why"))


# ---- index files of a partition --------------------------------------------------------------
