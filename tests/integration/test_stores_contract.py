"""What every store promises, on a folder, moto's S3 and the Google Cloud Storage stand-in."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from fedemb.data.input_version import fingerprint_input, locate
from fedemb.errors import ArtifactError, LedgerError, StorageError
from fedemb.foundation.canonical_json import tree_digests
from fedemb.keys import open_key_store
from fedemb.storage import join, local_tree, open_store
from tests.kit import ledger_kit as kit_
from tests.kit.pipeline_runs import ledger_race


def test_written_object_is_read_back_whole(store_uri):
    store = open_store(store_uri)
    store.write("a/b.bin", b"first")
    store.write("a/b.bin", b"second")
    assert store.read("a/b.bin") == b"second"
    assert store.exists("a/b.bin")
    assert not store.exists("a/b")


def test_missing_object_is_file_not_found(store_uri):
    store = open_store(store_uri)
    store.write("present", b"")
    assert store.read("present") == b""
    with pytest.raises(FileNotFoundError):
        store.read("absent")
    store.delete("absent")


def test_create_refuses_a_name_that_exists(store_uri):
    store = open_store(store_uri)
    store.create("entry", b"mine")
    with pytest.raises(FileExistsError):
        store.create("entry", b"mine")
    assert store.read("entry") == b"mine"


def test_create_refuses_an_existing_name_in_a_locked_store(gcs_environment):
    """Google may check rights before conditions."""
    from google.auth.credentials import AnonymousCredentials
    from google.cloud import storage

    client = storage.Client(credentials=AnonymousCredentials(), project="stand-in")
    client.create_bucket("fedemb-create-only")
    client.create_bucket("fedemb-read-only")
    store = open_store("gs://fedemb-create-only/root")
    store.create("entry", b"mine")
    with pytest.raises(FileExistsError):
        store.create("entry", b"other")
    with pytest.raises(StorageError, match="could not be written"):
        store.write("entry", b"other")
    with pytest.raises(StorageError, match="could not be written"):
        open_store("gs://fedemb-read-only/root").create("entry", b"mine")
    assert store.read("entry") == b"mine"


def test_list_is_sorted_relative_and_by_string_prefix(store_uri):
    store = open_store(store_uri)
    for name in ("b", "a/2", "a/1", "ab"):
        store.write(name, b"x")
    assert store.list() == ["a/1", "a/2", "ab", "b"]
    assert store.list("a") == ["a/1", "a/2", "ab"]
    assert store.list("a/") == ["a/1", "a/2"]
    assert open_store(join(store_uri, "a")).list() == ["1", "2"]
    assert store.list("nothing/here") == []
    store.delete("a/1")
    assert store.list("a/") == ["a/2"]


def test_store_returns_its_clock(store_uri):
    store = open_store(store_uri)
    store.write("a", b"")
    there = store.clock()
    assert there is not None
    assert abs(datetime.now(UTC) - there) < timedelta(minutes=2)


def test_unsafe_names_are_refused_before_anything_is_sent(store_uri):
    store = open_store(store_uri)
    for name in ("", "/etc/passwd", "a/../b", ".hidden", "a//b", "a\n", "a\\b"):
        with pytest.raises(StorageError, match="object name"):
            store.write(name, b"x")
        with pytest.raises(StorageError, match="object name"):
            store.read(name)


@pytest.fixture
def tree(tmp_path) -> Path:
    """A small finished folder."""
    root = tmp_path / "tree"
    (root / "variables").mkdir(parents=True)
    (root / "model.keras").write_bytes(b"weights")
    (root / "variables" / "0").write_bytes(bytes(1000))
    return root


def _content(root: Path) -> dict[str, bytes]:
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file()
    }


def test_publishing_again_sends_only_what_changed(store_uri, tree):
    store = open_store(store_uri)
    store.upload_tree(tree, "one")
    sent = []
    upload = store._upload
    store._upload = lambda local, name, digest: (sent.append(name), upload(local, name, digest))
    store.upload_tree(tree, "one")
    assert sent == []
    (tree / "model.keras").write_bytes(b"other weights")
    store.upload_tree(tree, "one")
    assert sent == ["one/model.keras"]
    with local_tree(join(store_uri, "one")) as local:
        assert _content(local) == _content(tree)


def test_missing_tree_is_a_storage_error(store_uri):
    with pytest.raises(StorageError, match="nothing"), local_tree(join(store_uri, "no", "tree")):
        pass


@pytest.mark.parametrize("backend", ["gcs_store_uri", "s3_store_uri"])
def test_tampered_or_incomplete_remote_tree_is_refused(backend, tree, request):
    store_uri = request.getfixturevalue(backend)
    store = open_store(store_uri)
    store.upload_tree(tree, "one")
    store.write("one/model.keras", b"tampered")
    with pytest.raises(ArtifactError, match="not what its index"), local_tree(f"{store_uri}/one"):
        pass
    store.delete("one/model.keras")
    with pytest.raises(ArtifactError, match="missing"), local_tree(f"{store_uri}/one"):
        pass


def test_listing_of_several_pages_is_complete(s3_store_uri):
    store = open_store(s3_store_uri)  # the stand-in pages at 50 names
    for number in range(102):
        store.write(f"many/{number:05}", b"")
    assert store.list("many/") == [f"many/{number:05}" for number in range(102)]


def test_trees_created_under_one_name_are_never_mixed(store_uri, tree, tmp_path):
    store = open_store(store_uri)
    store.create_tree(tree, "releases/one")
    name = store.tree_name("releases/one", tree_digests(tree))
    other = tmp_path / "other"
    (other / "variables").mkdir(parents=True)
    (other / "model.keras").write_bytes(b"another model")
    if store.local_root is not None:  # a folder: the name is taken
        assert name == "releases/one"
        with pytest.raises(FileExistsError):
            store.create_tree(other, "releases/one")
    else:  # a bucket: both are there, each whole, and a marker decides
        store.create_tree(other, "releases/one")
        second = store.tree_name("releases/one", tree_digests(other))
        assert second != name
        with local_tree(join(store_uri, second)) as local:
            assert _content(local) == _content(other)
        store.create_tree(tree, "releases/one")
    with local_tree(join(store_uri, name)) as local:
        assert _content(local) == _content(tree)


def test_entries_name_size_and_version_of_what_is_there(store_uri):
    store = open_store(store_uri)
    for name, data in (("in/b", b"12345"), ("in/a", b"123"), ("out", b"")):
        store.write(name, data)
    found = list(store.entries("in/"))
    assert [(entry.name, entry.size) for entry in found] == [("in/a", 3), ("in/b", 5)]
    assert list(store.entries("none/")) == []
    if store.local_root is None:
        store.write("in/a", b"321")
        versions = [entry.version for entry in store.entries("in/")]
        assert versions[0] != found[0].version
        assert versions[1] == found[1].version


def test_object_is_read_up_to_a_limit_and_no_further(store_uri):
    store = open_store(store_uri)
    for size in (0, 9, 10, 11, 3000):
        store.write("a/photo", bytes(size))
        assert store.read_up_to("a/photo", 10) == (bytes(size) if size <= 10 else None)
    with pytest.raises(FileNotFoundError):
        store.read_up_to("a/other", 10)


def test_existing_folder_with_brackets_is_not_a_pattern(store_uri):
    store = open_store(store_uri)
    for name in ("photos [2024]/a.parquet", "photos 2/b.parquet", "other/c.parquet"):
        store.write(name, b"a")
    for rest in ("photos [2024]/a.parquet", "photos [2024]/*.parquet", "photos [2024]"):
        (entry,) = locate(f"{store_uri}/{rest}").entries()
        assert entry.name.endswith("a.parquet")
    (entry,) = locate(f"{store_uri}/photos [123]/*.parquet").entries()
    assert entry.name == "photos 2/b.parquet"
    assert not list(locate(f"{store_uri}/photos [789]/*.parquet").entries())


# ---- What a reservation binds of the input ----


KEY = b"k" * 32


def _bound(uri: str, run_id: str = "monday") -> str:
    return fingerprint_input(uri, KEY, run_id)


@pytest.mark.long
def test_input_fingerprint_changes_only_with_its_objects_run_and_key(store_uri):
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


def test_fingerprint_of_a_file_or_glob_covers_only_matching_objects(store_uri):
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
def test_input_fingerprint_covers_files_of_any_name(tmp_path, name):
    (tmp_path / "ada").mkdir()
    before = fingerprint_input(str(tmp_path), KEY, "monday")
    (tmp_path / "ada" / name).write_bytes(b"x")
    first = fingerprint_input(str(tmp_path), KEY, "monday")
    (tmp_path / "ada" / name).write_bytes(b"xy")
    assert len({before, first, fingerprint_input(str(tmp_path), KEY, "monday")}) == 3


def test_percent_in_a_local_path_is_not_decoded(tmp_path):
    folder = tmp_path / "my%20photos"
    for place in (folder, tmp_path / "my photos"):
        place.mkdir()
        (place / "a.jpg").write_bytes(b"x")
    first = fingerprint_input(str(folder), KEY, "monday")
    (folder / "b.jpg").write_bytes(b"y")
    assert fingerprint_input(str(folder), KEY, "monday") != first
    assert "#" in fingerprint_input(f"file://{tmp_path}/my%20photos", KEY, "monday")


# ---- The ledger on a folder, moto's S3 and the GCS stand-in, which enforces preconditions ----


@pytest.mark.long
def test_ledger_records_of_a_run_are_equal_on_every_store(store_uri, tmp_path):
    kit = kit_.make(tmp_path, store_uri)
    ledger = kit.open()
    reservation = ledger.reserve(run_id="monday", content=kit_.content())
    assert kit.open().reserve(run_id="monday", content=kit_.content()) == reservation
    kit_.bind(ledger, reservation)
    kit_.commit(kit, ledger, reservation, 3)
    kit.open().verify([reservation.anchor])
    open_store(store_uri).delete("weekly/00000001.json")
    with pytest.raises(LedgerError, match="00000001"):
        kit.open()


@pytest.mark.long
@pytest.mark.parametrize("processes", [6, pytest.param(50, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["gcs", "s3"])
def test_concurrent_processes_never_exceed_the_cap_in_buckets(kind, processes, tmp_path, request):
    uri = request.getfixturevalue(f"{kind}_store_uri")
    ledger_race.check(tmp_path, uri, processes)


def test_missing_remote_ledger_is_not_created_by_a_run(s3_store_uri, tmp_path):
    from fedemb.privacy.registry import plan_mechanism
    from fedemb.steps.reserve_budget import open_or_create
    from tests.kit.pipeline_runs import honest_run

    run = honest_run.start(tmp_path)
    keys = open_key_store(run.keys_uri)
    with pytest.raises(LedgerError, match="ledger init"):
        open_or_create(s3_store_uri, keys, run.config, plan_mechanism(run.config))
