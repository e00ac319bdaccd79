"""What a reservation binds of the input, on a folder and in buckets; a change since is refused."""

import pytest

from fedemb.data.input_version import fingerprint_input
from fedemb.storage import join, open_store

KEY = b"k" * 32


def _bound(uri: str, run_id: str = "monday") -> str:
    return fingerprint_input(uri, KEY, run_id)


@pytest.mark.long
def test_version_of_the_input_follows_its_objects_and_nothing_else(store_uri):
    store = open_store(store_uri)
    uri = join(store_uri, "in", "photos")
    assert _bound(uri) == uri  # nothing there: partition_users says so
    for name in ("in/photos/a.parquet", "in/photos/b/c.parquet", "in/photos-2/d", "in/other"):
        store.write(name, b"four")
    first = _bound(uri)
    assert first.startswith(f"{uri}#")
    assert len(first.rpartition("#")[2]) == 64
    assert _bound(uri) == first
    assert _bound(uri, "tuesday") != first
    assert fingerprint_input(uri, b"x" * 32, "monday") != first
    store.write("in/photos-2/d", b"not of this input")
    assert _bound(uri) == first
    store.write("in/photos/z", b"one more")
    assert _bound(uri) != first
    store.delete("in/photos/z")
    assert _bound(uri) == first
    if store.local_root is None:  # same size, other content: the version of the object
        store.write("in/photos/a.parquet", b"FOUR")
        assert _bound(uri) != first
        store.write("in/photos/a.parquet", b"four")
        assert _bound(uri) == first


def test_file_and_glob_bind_what_they_name(store_uri):
    store = open_store(store_uri)
    for name in ("day=1/a.parquet", "day=2/a.parquet", "day=2/notes.txt"):
        store.write(name, b"rows")
    one, all_ = join(store_uri, "day=1/a.parquet"), join(store_uri, "day=*/*.parquet")
    before = _bound(one), _bound(all_)
    assert before[0] != one
    assert before[1] != all_
    store.write("day=2/notes.txt", b"more of them")
    assert (_bound(one), _bound(all_)) == before
    store.write("day=2/a.parquet", b"rows and rows")
    assert _bound(one) == before[0]
    assert _bound(all_) != before[1]


def test_version_of_composed_and_multipart_objects_is_known(s3_store_uri, gcs_store_uri, tmp_path):
    shard = tmp_path / "shard"
    shard.write_bytes(b"x" * (20 << 20))
    for uri in (s3_store_uri, gcs_store_uri):
        store = open_store(uri)
        store._upload(shard, "in/shard", "0" * 64)
        (entry,) = store.entries("in/")
        assert (entry.name, entry.size) == ("in/shard", 20 << 20)
        assert entry.version


@pytest.mark.parametrize("name", ["photo\u30001.jpg", "caf\udce9.jpg", "CORP\\ada.jpg"])
def test_file_with_any_name_is_bound(tmp_path, name):
    (tmp_path / "ada").mkdir()
    before = fingerprint_input(str(tmp_path), KEY, "monday")
    (tmp_path / "ada" / name).write_bytes(b"x")
    first = fingerprint_input(str(tmp_path), KEY, "monday")
    (tmp_path / "ada" / name).write_bytes(b"xy")
    assert len({before, first, fingerprint_input(str(tmp_path), KEY, "monday")}) == 3


def test_percent_in_a_path_is_a_percent(tmp_path):
    folder = tmp_path / "my%20photos"
    for place in (folder, tmp_path / "my photos"):
        place.mkdir()
        (place / "a.jpg").write_bytes(b"x")
    first = fingerprint_input(str(folder), KEY, "monday")
    (folder / "b.jpg").write_bytes(b"y")
    assert fingerprint_input(str(folder), KEY, "monday") != first
    assert "#" in fingerprint_input(f"file://{tmp_path}/my%20photos", KEY, "monday")
