"""Addresses, and what only a folder can do as a store."""

import errno
import os
from pathlib import Path

import pytest

from fedemb.errors import InputError, StorageError
from fedemb.foundation.files import write_bytes
from fedemb.storage import local_tree, open_store
from fedemb.storage.local import LocalStore


@pytest.mark.parametrize(
    ("uri", "root"),
    [
        ("/data/x", "/data/x"),
        ("/data/x/", "/data/x"),
        ("file:///data/with%20space", "/data/with space"),
        ("file://localhost/data", "/data"),
    ],
)
def test_local_addresses(uri, root):
    assert open_store(uri).local_root == Path(root)


@pytest.mark.parametrize(
    "uri", ["", "http://host/x", "gs:///x", "s3://", "file://host/x", "gcs://bucket/x"]
)
def test_other_addresses_are_refused_with_what_is_known(uri):
    with pytest.raises(InputError, match=r"(gs|s3)://"):
        open_store(uri)


def test_remote_stores_contact_nobody_when_opened():
    for uri in ("gs://bucket/a/b", "s3://bucket/a/b/"):
        store = open_store(uri)
        assert store.local_root is None
        assert store.uri == uri.rstrip("/")


def test_tree_cannot_be_a_whole_bucket(tmp_path):
    with pytest.raises(InputError, match="whole store"), local_tree("gs://bucket"):
        pass


def test_a_tree_that_fails_half_way_leaves_nothing(tmp_path, monkeypatch):
    source = tmp_path / "source"
    source.mkdir()
    for name in "abcd":
        (source / name).write_bytes(b"x")
    real = os.fsync
    calls = []

    def full_disk(descriptor):
        calls.append(descriptor)
        if len(calls) > 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(StorageError, match="No space left"):
        open_store(tmp_path / "store").upload_tree(source, "tree")
    assert list((tmp_path / "store").iterdir()) == []


def test_temporary_files_of_a_killed_writer_are_not_listed(tmp_path):
    store = open_store(tmp_path)
    store.write("a", b"x")
    (tmp_path / ".a.tmp1").write_bytes(b"half")
    (tmp_path / ".tree.tmp2").mkdir()
    (tmp_path / ".tree.tmp2" / "b").write_bytes(b"half")
    assert store.list() == ["a"]


def test_a_folder_in_the_place_of_an_object_is_a_sentence(tmp_path):
    store = open_store(tmp_path)
    store.write("a/b", b"x")
    with pytest.raises(FileNotFoundError):
        store.read("a")
    with pytest.raises(InputError):
        store.write("a", b"x")
    with pytest.raises(InputError):
        store.write("a/b/c", b"x")


def test_local_tree_is_the_folder_itself(tmp_path):
    with local_tree(tmp_path) as tree:
        assert tree == tmp_path
    with pytest.raises(StorageError, match="nothing at"), local_tree(tmp_path / "absent"):
        pass


def test_tree_that_appears_while_another_is_copied_is_not_mixed_with_it(tmp_path, monkeypatch):
    source = tmp_path / "source"
    source.mkdir()
    (source / "a").write_bytes(b"mine")
    store = open_store(tmp_path / "store")
    rival = tmp_path / "store" / "tree"

    upload = LocalStore._upload

    def slow(staged, *file):
        upload(staged, *file)
        rival.mkdir(parents=True)
        (rival / "b").write_bytes(b"theirs")

    monkeypatch.setattr(LocalStore, "_upload", slow)
    with pytest.raises(FileExistsError):
        store._rename_in(source, "tree")
    assert store.list() == ["tree/b"]
    with pytest.raises(FileExistsError):
        store.create_tree(source, "tree")
    assert store.list() == ["tree/b"]


def test_wrong_path_is_bad_input_and_a_full_disk_is_not(tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(InputError) as wrong:
        write_bytes(tmp_path / "file" / "below", b"x")
    assert wrong.value.exit_code == 2
    with pytest.raises(InputError):
        write_bytes(tmp_path / ("n" * 300), b"x")

    def full_disk(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(StorageError) as full:
        write_bytes(tmp_path / "other", b"x")
    assert full.value.exit_code == 4
    assert not (tmp_path / "other").exists()
