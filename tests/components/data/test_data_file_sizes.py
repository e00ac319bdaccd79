"""A file of any size among the photos is a bad record: it is bounded before it is read."""

import io
import os

import pytest
from PIL import Image

from fedemb.data import image_files, photos
from fedemb.data.image_files import ImageFiles
from fedemb.data.photos import MAX_BYTES, BadImageError, PhotoReader
from fedemb.partition.check import check
from fedemb.release.embed_photos import decoded
from fedemb.release.photo_source import PhotoSource
from tests.kit.pipeline_runs.partition_run import make_config, picture

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


def test_bytes_in_a_table_have_the_same_bound(monkeypatch):
    sink = io.BytesIO()
    Image.new("L", (8, 8)).save(sink, "PNG")
    assert PhotoReader(8, 1).read(sink.getvalue()).shape == (8, 8, 1)
    monkeypatch.setattr(photos, "MAX_BYTES", 10)
    with pytest.raises(BadImageError, match="file_too_large"):
        PhotoReader(8, 1).read(sink.getvalue())


def test_file_that_grows_while_it_is_read_is_bounded_too(tmp_path, monkeypatch):
    monkeypatch.setattr(image_files, "MAX_BYTES", 10)
    (tmp_path / "a.png").write_bytes(bytes(11))
    with pytest.raises(BadImageError, match="file_too_large"):
        ImageFiles(str(tmp_path)).read("a.png")
    assert MAX_BYTES < 1 << 30
