"""Fuzzes each reader: damaged files are an error in one sentence, or records that are counted."""

from __future__ import annotations

import csv
import io
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
from fedemb.data.identity import Hasher
from fedemb.data.sources import Batch, find_parts, read_part, split_part
from fedemb.errors import ConfigError, InputError
from fedemb.partition.prepare import Preparer
from tests.components.partition_users.test_partition_sources import example as tf_example
from tests.components.partition_users.test_partition_sources import write_tfrecord
from tests.kit.pipeline_runs.partition_run import KEY, make_config, rows_of, write_parquet

COLUMNS = ["user_id", "label"]
Write = Callable[[Path], str]

short = settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    derandomize=True,
)
"""The same examples in each run of CI."""


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


def write_records(folder: Path, name: str = "t.tfrecord") -> str:
    return Path(write_tfrecord(folder / name, [tf_example(row) for row in rows_of(3)])).name


def write_packed_records(folder: Path) -> str:
    return write_records(folder, "t.tfrecord.gz")


WRITERS = (write_csv, write_rows, write_records, write_packed_records)


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


@pytest.mark.parametrize("name", [b"image", b"user_id", b"label"])
def test_column_name_that_is_not_utf_8_is_refused(tmp_path, name):
    data = written(write_rows).replace(name, name[:2] + b"\xff" + name[3:])
    (tmp_path / "t.parquet").write_bytes(data)
    for use in (read_and_prepare, lambda uri: guess_source(str(uri), {})):
        with pytest.raises(InputError, match=r"name is not UTF-8 text\. Rename the column"):
            use(tmp_path / "t.parquet")


@pytest.mark.parametrize("write", WRITERS)
@given(damage=damages())
@short
def test_damaged_file_is_refused_or_counted(write, damage):
    with tempfile.TemporaryDirectory() as made:
        path = Path(made)
        name = write(path)
        (path / name).write_bytes(damage(written(write)))
        for use in (read_and_prepare, lambda uri: guess_source(str(uri), {})):
            with one_sentence(InputError, ConfigError):
                use(path / name)


# ---- contents ------------------------------------------------------------------------------------

CELL = st.one_of(
    st.text(alphabet='ab,"\n\r\t;é\x00 ', max_size=6),
    st.sampled_from(["0.png", "1.0", "../0.png", '"', '"a', 'b"', "", " ", "NaN", "null", "1e17"]),
)


def _least(text: str) -> int:
    """Lines below the header, without breaks at the ends of a quoted value, which are trimmed."""
    rows = list(csv.reader(io.StringIO(text, newline="")))[1:]
    return sum(1 + sum(cell.strip().count("\n") for cell in row) for row in rows if row)


TABLES = st.lists(st.lists(CELL, min_size=1, max_size=4), max_size=6)


@given(rows=TABLES, encoding=st.sampled_from(["utf-8", "latin-1"]))
@example(rows=[["", '"'], ['"', ""]], encoding="utf-8")
@short
def test_every_csv_line_is_a_record_or_reported(rows, encoding):
    """Every line below the header is a record, or is said to be inside quotes."""
    with tempfile.TemporaryDirectory() as made:
        path = Path(made)
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
