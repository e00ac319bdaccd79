"""Retention on every store: a private tree and its index go, everything else stays."""

from datetime import UTC, datetime, timedelta

import pytest

from fedemb.errors import StorageError
from fedemb.steps.delete_expired.retention import (
    PRIVATE,
    WORKING,
    KnownRun,
    Retention,
    delete,
    find_expired,
)
from fedemb.storage import join, open_store, put_tree

NOW = datetime(2027, 8, 2, tzinfo=UTC)


@pytest.mark.long
def test_expired_trees_are_deleted_and_nothing_else(store_uri, tmp_path):
    tree = tmp_path / "tree"
    for number in range(12):
        (tree / f"part-{number:02d}").parent.mkdir(exist_ok=True)
        (tree / f"part-{number:02d}").write_text("data")
    for folder in (*PRIVATE, *WORKING):
        put_tree(tree, join(store_uri, "old", folder))
    for name in ("old-2/users", "older/users", "new/users"):
        put_tree(tree, join(store_uri, name))
    store = open_store(store_uri)
    store.write("old/others/weekly/marks", b"data")
    store.write("old/users-of-others/part-0", b"data")
    before = set(store.list())
    runs = [
        KnownRun("old", "measured", NOW - timedelta(days=31)),
        KnownRun("new", "measured", NOW - timedelta(days=6)),
    ]
    found = list(find_expired(runs, Retention(), NOW, store_uri, None))
    assert {item.folder for item in found} == {f"old/{name}" for name in (*PRIVATE, *WORKING)}
    for item in found:
        delete(item)
    left = set(open_store(store_uri).list())
    assert before - left == {name for item in found for name in item.names}
    assert {name.split("/")[0] for name in left} == {"old", "old-2", "older", "new"}
    kept = {name for name in left if name.startswith("old/")}
    assert kept == {"old/others/weekly/marks", "old/users-of-others/part-0"}


def test_interrupted_deletion_is_finished_by_the_next(store_uri):
    store = open_store(store_uri)
    for number in range(4):
        store.write(f"old/users/part-{number}", b"data")
    runs = [KnownRun("old", "void", NOW - timedelta(days=31))]
    (item,) = find_expired(runs, Retention(), NOW, store_uri, None)
    with pytest.MonkeyPatch.context() as patched:
        fails = _fails_at("old/users/part-2", type(store).delete)
        patched.setattr(type(store), "delete", fails)
        with pytest.raises(StorageError):
            delete(item)
    (rest,) = find_expired(runs, Retention(), NOW, store_uri, None)
    assert rest.names == ("old/users/part-2", "old/users/part-3")
    delete(rest)
    assert open_store(store_uri).list() == []


def _fails_at(name, real):
    def fails(store, asked):
        if asked == name:
            raise StorageError("the store does not answer")
        real(store, asked)

    return fails
