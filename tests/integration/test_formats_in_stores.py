"""Every format gives the same users from a folder and from a bucket."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedemb.data.columns import guess_source
from fedemb.data.input_version import fingerprint_input
from fedemb.release.photo_source import PhotoSource
from fedemb.storage import join, open_store
from tests.components.data.test_fuzz_readers import (
    read_and_prepare,
    write_csv,
    write_folder,
    write_packed_records,
    write_records,
    write_rows,
)
from tests.kit.pipeline_runs.partition_run import rows_of, write_parquet

pytestmark = pytest.mark.slow
WRITERS = (write_folder, write_csv, write_rows, write_records, write_packed_records)


@pytest.fixture(params=["gcs", "s3"])
def bucket(request: pytest.FixtureRequest) -> str:
    return request.getfixturevalue(f"{request.param}_store_uri")


def upload(folder: Path, uri: str) -> None:
    store = open_store(uri)
    for path in folder.rglob("*"):
        if path.is_file():
            store.write(path.relative_to(folder).as_posix(), path.read_bytes())


@pytest.mark.parametrize("write", WRITERS)
def test_bucket_gives_the_records_of_a_folder(bucket, tmp_path, write):
    name = write(tmp_path)
    upload(tmp_path, join(bucket, "in"))
    uri = join(bucket, "in", name)
    assert read_and_prepare(uri) == read_and_prepare(tmp_path / name) > 0
    assert fingerprint_input(uri, bytes(32), "run").startswith(f"{uri}#")
    if write is not write_folder and write not in (write_records, write_packed_records):
        named = {"user_id": "user_id"}
        assert guess_source(uri, named).columns == guess_source(str(tmp_path / name), named).columns


def test_shards_of_a_bucket_are_named_by_a_pattern(bucket, tmp_path):
    for number, row in enumerate(rows_of(2)):
        write_parquet(tmp_path / f"s-{number}.parquet", [row])
    upload(tmp_path, join(bucket, "in"))
    last = len(rows_of(2)) - 1
    assert read_and_prepare(join(bucket, "in", "s-*.parquet")) == last + 1
    source = PhotoSource(join(bucket, "in"))
    photos = [*source.photos()]
    assert [isinstance(data, bytes) for _, data in photos] == [True] * (last + 1)
