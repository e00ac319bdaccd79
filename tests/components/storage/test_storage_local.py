"""Addresses, and what only a folder can do as a store."""

import ast
import errno
import os
import stat
from pathlib import Path

import pytest

from fedemb.config import BuiltinData
from fedemb.data.builtin import write_builtin
from fedemb.errors import InputError, StorageError
from fedemb.foundation.files import create_bytes, new_file, open_log, write_bytes
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
def test_local_storage_uris_are_resolved_to_paths(uri, root):
    assert open_store(uri).local_root == Path(root)


@pytest.mark.parametrize(
    "uri", ["", "http://host/x", "gs:///x", "s3://", "file://host/x", "gcs://bucket/x"]
)
def test_unsupported_storage_uri_is_refused(uri):
    with pytest.raises(InputError, match=r"(gs|s3)://"):
        open_store(uri)


def test_opening_a_remote_store_makes_no_request():
    for uri in ("gs://bucket/a/b", "s3://bucket/a/b/"):
        store = open_store(uri)
        assert store.local_root is None
        assert store.uri == uri.rstrip("/")


def test_tree_cannot_be_a_whole_bucket(tmp_path):
    with pytest.raises(InputError, match="whole store"), local_tree("gs://bucket"):
        pass


def test_failed_tree_copy_leaves_nothing(tmp_path, monkeypatch):
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


def test_folder_instead_of_an_object_is_a_storage_error(tmp_path):
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


def test_concurrent_tree_copies_are_not_mixed(tmp_path, monkeypatch):
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


def test_invalid_path_is_an_input_error_and_a_full_disk_a_storage_error(tmp_path, monkeypatch):
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


# ---- Every output goes through `foundation.files`: the list of writers, and what is refused ----


ROOT = Path(__file__).parents[3]
PACKAGES = [ROOT / "components", ROOT / "pipelines"]
MEMORY, SCRATCH = "into memory", "into a temporary folder of its own"
ELSEWHERE = {
    "components/fedemb/steps/audit_privacy.py write_table": MEMORY,
    "components/fedemb/data/builtin.py ParquetWriter": "into a file of fedemb.foundation.files",
    "components/fedemb/data/builtin.py write_table": "into a file of fedemb.foundation.files",
    "components/fedemb/data/client_data.py new_file": MEMORY,
    "components/fedemb/data/client_data.py write_table": MEMORY,
    "components/fedemb/data/hostile_photos.py save": MEMORY,
    "components/fedemb/models/backbone_files.py save": SCRATCH,
    "components/fedemb/models/backbone_files.py ZipFile": MEMORY,
    "components/fedemb/release/embed_photos.py ParquetWriter": SCRATCH,
    "components/fedemb/release/embed_photos.py write_table": "see ParquetWriter",
    "components/fedemb/training/server.py savez": MEMORY,
    "components/fedemb/foundation/step_logging.py fdopen": "standard output",
    "components/fedemb/foundation/step_logging.py open": "the null device",
    "components/fedemb/data/client_data.py open": SCRATCH,
    "components/fedemb/storage/local.py copyfile": "a download into a temporary folder",
    "components/fedemb/storage/local.py rename": "a finished folder to a name that must be free",
    "components/fedemb/keys/stores.py open": "destroys a key in place",
    "components/fedemb/training/trainer.py save": "checkpoints, through a store",
    "components/fedemb/training/hosts.py write_bytes": SCRATCH,
    "components/fedemb/partition/transforms.py save": MEMORY,
    "components/fedemb/partition/transforms.py write_bytes": SCRATCH,
    "components/fedemb/partition/shards.py write_table": MEMORY,
    "components/fedemb/steps/plan_privacy.py write_text": "KFP names the path and uploads the file",
    "components/fedemb/release/released.py save": SCRATCH,
    "pipelines/cli/ledger.py save": "TrustStore.save goes through foundation.files",
    "pipelines/cli/options.py open": "the null device",
    "pipelines/run/directory.py open": "an empty lock file of mode 0600",
    "pipelines/run/local.py open": "the null device",
    "pipelines/cluster/kubeflow.py write_text": SCRATCH,
    "pipelines/cluster/submission.py write_text": SCRATCH,
    "components/fedemb/partition/shards.py open": "images of one process, in a folder of its own",
}
"""Calls that write in another way, and why they may."""
_WRITERS = {
    *("write_text", "write_table", "ParquetWriter", "mkstemp", "NamedTemporaryFile", "touch"),
    *("copyfile", "copy", "copy2", "move", "copytree", "symlink_to", "hardlink_to", "rename"),
    *("save", "savez", "savez_compressed", "tofile", "FileHandler", "urlretrieve"),
    *("new_file", "write_feather", "to_parquet", "to_csv", "dump_all", "extractall"),
}


def _name(call):
    function = call.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _opens_for_writing(call):
    """Whether a mode or flags among the arguments allow a write; one that is unknown counts."""
    if ast.unparse(call.func) == "os.open":
        return "O_RDONLY" not in ast.unparse(call)
    given = [*call.args, *(word.value for word in call.keywords if word.arg == "mode")]
    modes = [one.value for one in given if isinstance(one, ast.Constant)]
    return any(
        isinstance(one, str) and set(one) <= set("rwaxbt+U") and set(one) & set("wax+")
        for one in modes
    )


def _writes(call):
    name, method = _name(call), isinstance(call.func, ast.Attribute)
    if name in ("write_bytes", "new_file"):
        return method  # of Path and of Arrow; the functions of these names are ours
    if name in ("open", "fdopen", "ZipFile"):
        return _opens_for_writing(call)
    if name == "copy":
        return ast.unparse(call.func).startswith("shutil")
    if name == "replace":  # str.replace takes two arguments
        other = ast.unparse(call.func).startswith(("re.", "dataclasses."))
        return len(call.args) == 1 and not call.keywords and not other
    return name in _WRITERS


OURS, CHECKED = "a file of this package, or written by this process", "its digest was compared"
READ_ELSEWHERE = {
    "components/fedemb/__init__.py read_text": OURS,
    "components/fedemb/data/client_data.py ParquetFile": CHECKED,
    "components/fedemb/data/client_data.py fdopen": "its own copy and digest of regular files",
    "components/fedemb/data/client_data.py memory_map": CHECKED,
    "components/fedemb/data/image_files.py fdopen": "its own limit, and no link leads out",
    "components/fedemb/data/image_files.py open": "see fdopen",
    "components/fedemb/data/client_data.py open": "see fdopen",
    "components/fedemb/data/photos.py open": MEMORY,
    "components/fedemb/data/tables.py ParquetFile": "Arrow reads pieces, with limits of metadata",
    "components/fedemb/documents/model.py ZipFile": "an open regular file, in a limited process",
    "components/fedemb/models/backbone_files.py ZipFile": "packed members are refused",
    "components/fedemb/models/backbone_files.py load_model": CHECKED,
    "components/fedemb/models/imported.py load_model": "after check_import",
    "components/fedemb/models/keras_backend.py read_text": "settings of Keras, and of a driver",
    "components/fedemb/models/public_backbones.py open": CHECKED,
    "components/fedemb/models/public_backbones.py read_text": "the licence of a package",
    "components/fedemb/partition/check.py open": MEMORY,
    "components/fedemb/partition/transforms.py load": SCRATCH,
    "components/fedemb/release/released.py read_bytes": SCRATCH,
    "components/fedemb/release/verify.py read_bytes": OURS,
    "components/fedemb/reports/report.py read_text": OURS,
    "components/fedemb/runtime/provenance.py read_bytes": OURS,
    "components/fedemb/runtime/step_context.py read_bytes": OURS,
    "components/fedemb/storage/local.py open": "an upload of our own file, and a folder",
    "components/fedemb/training/hosts.py read_bytes": SCRATCH,
    "components/fedemb/training/server.py load": MEMORY,
    "components/fedemb/training/noise_warnings.py read_text": OURS,
    "pipelines/cli/cluster.py read_text": "the namespace that Kubernetes mounts",
    "pipelines/cli/init_settings.py read_text": OURS,
    "pipelines/run/directory.py open": "an empty lock file of mode 0600",
    "pipelines/run/directory.py read_bytes": OURS,
    "pipelines/run/pages.py read_bytes": OURS,
}
"""Calls that read without `open_regular` or a store, and why no pipe or endless file harms them."""
_READERS = {
    *("open", "fdopen", "read_text", "read_bytes", "ZipFile", "ParquetFile", "read_table"),
    *("memory_map", "load_model", "urlopen", "fromfile"),
}


def _reads(call):
    name, whole = _name(call), ast.unparse(call.func)
    if name == "load":
        return whole == "np.load"
    ours = ("RunDirectory.", "act.", "reading.", "webbrowser.")
    return name in _READERS and not _writes(call) and not whole.startswith(ours)


@pytest.mark.parametrize(("matches", "listed"), [(_writes, ELSEWHERE), (_reads, READ_ELSEWHERE)])
def test_every_file_is_written_and_read_by_the_shared_way_or_named_here(matches, listed):
    found = set()
    for path in (path for package in PACKAGES for path in package.rglob("*.py")):
        where = path.relative_to(ROOT).as_posix()
        calls = [node for node in ast.walk(ast.parse(path.read_text())) if type(node) is ast.Call]
        found |= {f"{where} {_name(call)}" for call in calls if matches(call)}
    shared = "components/fedemb/foundation/files.py"
    assert {call for call in found if not call.startswith(shared)} == set(listed)


def _outputs(tmp_path):
    """Writers of all kinds, each given a path."""

    def upload(path):
        whole = tmp_path / "whole"
        whole.write_bytes(b"a")
        open_store(path.parent).upload(whole, path.name)

    def block(path):
        with new_file(path) as file:
            file.write(b"a")

    return {
        "write_bytes": lambda path: write_bytes(path, b"a"),
        "new_file": block,
        "open_log": lambda path: open_log(path).close(),
        "store.write": lambda path: open_store(path.parent).write(path.name, b"a"),
        "store.upload": upload,
        "make-data": lambda path: write_builtin(
            BuiltinData(users=100, public_classes=2), 8, path, tmp_path / "public.parquet"
        ),
    }


KINDS = sorted(_outputs(Path()))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("special", ["pipe", "link to a pipe", "link to a file", "dangling link"])
def test_writer_refuses_to_replace_a_special_file(tmp_path, kind, special):
    target, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    if special == "pipe":
        os.mkfifo(target)
    else:
        target.symlink_to(elsewhere)
        if special == "link to a pipe":
            os.mkfifo(elsewhere)
        elif special == "link to a file":
            elsewhere.write_bytes(b"theirs")
    before = target.lstat()
    with pytest.raises(InputError, match="out"):
        _outputs(tmp_path)[kind](target)
    assert (target.lstat().st_ino, target.lstat().st_mode) == (before.st_ino, before.st_mode)
    if special == "link to a file":
        assert elsewhere.read_bytes() == b"theirs"
    if special == "dangling link":
        assert not elsewhere.exists()
    assert not list(tmp_path.glob(".out*"))


def test_create_refuses_the_name_of_a_dangling_link(tmp_path):
    (tmp_path / "out").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileExistsError):
        create_bytes(tmp_path / "out", b"a")
    assert not (tmp_path / "elsewhere").exists()


def test_store_refuses_to_write_through_a_link_that_leads_out(tmp_path):
    (tmp_path / "store").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "store" / "run").symlink_to(tmp_path / "elsewhere")
    store = open_store(tmp_path / "store")
    for write in (store.write, store.create):
        with pytest.raises(InputError, match="symbolic link"):
            write("run/model", b"a")
    assert not list((tmp_path / "elsewhere").iterdir())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("umask", "group_and_others"), [(0o077, 0), (0o022, 0o044)])
def test_every_writer_respects_the_umask(tmp_path, kind, umask, group_and_others):
    before = os.umask(umask)
    try:
        _outputs(tmp_path)[kind](tmp_path / "new" / "out" if kind != "open_log" else tmp_path / "o")
    finally:
        os.umask(before)
    (made,) = [path for path in (tmp_path / "new" / "out", tmp_path / "o") if path.exists()]
    expected = 0 if kind == "open_log" else group_and_others
    assert stat.S_IMODE(made.stat().st_mode) & 0o077 == expected
