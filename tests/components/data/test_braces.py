"""Shards that braces name, such as `s-{000..009}.parquet`."""

import pytest

from fedemb.config import SourceConfig
from fedemb.data.input_version import braces
from fedemb.data.source_parts import find_parts
from fedemb.errors import InputError
from tests.kit.pipeline_runs.partition_run import rows_of, write_parquet


def test_shard_that_braces_name_and_that_is_missing_is_refused(tmp_path):
    """Its users would be gone without a word."""
    for number in (0, 2):
        write_parquet(tmp_path / f"s-{number:03d}.parquet", rows_of(1))
    with pytest.raises(InputError, match=r"1 files that the braces .*s-001\.parquet"):
        find_parts(SourceConfig(uri=f"{tmp_path}/s-{{000..002}}.parquet"), [])
    parts = find_parts(SourceConfig(uri=f"{tmp_path}/s-{{000,002}}.parquet"), [])
    assert [part.name for part in parts] == ["s-000.parquet", "s-002.parquet"]
    (tmp_path / "x{0..1}").mkdir()
    write_parquet(tmp_path / "x{0..1}" / "a.parquet", rows_of(1))
    assert len(find_parts(SourceConfig(uri=f"{tmp_path}/x{{0..1}}/a.parquet"), [])) == 1


@pytest.mark.parametrize("text", ["{0..99999999999999999999}", "{9..1}", "{0..999}{0..999}"])
def test_braces_for_too_many_names_or_none_are_refused(text):
    with pytest.raises(InputError, match="names, expected 1 to 100,000"):
        braces(text)
