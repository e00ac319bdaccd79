"""Reading users and groups: order, threads, truncation, damage, size."""

from __future__ import annotations

import random
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedemb.data.client_data import (
    GROUPS_PER_FILE,
    STORE_SCHEMA,
    GroupIndex,
    UserStore,
    encode_groups,
    group_files,
    groups_in_file,
    groups_name,
    load_examples,
    split_groups,
)
from fedemb.errors import ArtifactError
from fedemb.foundation.document import write_json
from tests.kit.pipeline_runs.partition_run import SIZE, Partitioner, rows_of
from tests.kit.verified_folder import as_committed


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    partition = Partitioner(tmp_path_factory.mktemp("users"))
    return partition(rows_of(40, images=5), partition__shards=3).root / "users"


def test_rows_are_sorted_by_user_key_over_all_shards(folder: Path) -> None:
    store = UserStore(as_committed(folder))
    records = store.read(range(len(store)))
    assert [record.user_key for record in records] == store.user_keys.tolist()
    assert (np.diff(store.user_keys.astype(object)) > 0).all()
    assert store.image_counts.tolist() == [len(record.images) for record in records]
    assert GroupIndex(as_committed(folder)).user_keys.tolist() == store.user_keys.tolist()


def test_users_are_read_in_the_order_asked_for_from_many_threads(folder: Path) -> None:
    store = UserStore(as_committed(folder))
    everyone = store.read(range(len(store)))
    orders = [np.random.default_rng(n).integers(0, len(store), 30) for n in range(8)]
    with ThreadPoolExecutor(4) as pool:
        for order, records in zip(orders, pool.map(store.read, orders), strict=True):
            assert records == [everyone[row] for row in order]
    assert store.read([]) == []


def test_examples_do_not_depend_on_the_order_of_rows(folder: Path) -> None:
    store = UserStore(as_committed(folder))
    size = {"image_size": SIZE, "channels": 1}
    images, labels = load_examples(store, [7, 3, 5], max_examples=100, **size)
    again, same = load_examples(store, [3, 5, 7], max_examples=100, **size)
    np.testing.assert_array_equal(images, again)
    np.testing.assert_array_equal(labels, same)
    assert images.shape == (15, SIZE, SIZE, 1)
    assert labels.dtype == np.int64
    assert labels.tolist() == [label for user in store.read([3, 5, 7]) for label in user.labels]


def test_truncation_takes_something_of_every_user_first(folder: Path) -> None:
    store = UserStore(as_committed(folder))
    users = store.read([3, 5, 7])
    _, labels = load_examples(store, [3, 5, 7], max_examples=7, image_size=SIZE, channels=1)
    kept = [users[0].labels[:3], users[1].labels[:2], users[2].labels[:2]]
    assert labels.tolist() == [label for some in kept for label in some]


def test_images_of_another_size_are_refused(folder: Path) -> None:
    with pytest.raises(ArtifactError, match=r"8x8x1.*99x99x1.*partition_users"):
        load_examples(
            UserStore(as_committed(folder)), [0], max_examples=9, image_size=99, channels=1
        )


@pytest.mark.parametrize("damage", ["missing", "cut", "another"])
def test_damaged_shard_is_one_sentence(tmp_path: Path, folder: Path, damage: str) -> None:
    copy = tmp_path / "users"
    shutil.copytree(folder, copy)
    shard, other = sorted(copy.glob("*.arrayrecord"))[:2]
    if damage == "missing":
        shard.unlink()
    elif damage == "cut":
        shard.write_bytes(shard.read_bytes()[:1000])
    else:
        shard.write_bytes(b"")
        other.unlink()
    with pytest.raises(ArtifactError, match="run partition_users again"):
        UserStore(as_committed(copy)).read(range(5))


def test_incomplete_folder_is_one_sentence(tmp_path: Path) -> None:
    for opened in (UserStore, GroupIndex):
        with pytest.raises(ArtifactError):
            opened(as_committed(tmp_path))


@given(
    users=st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 2 * GROUPS_PER_FILE + 4)), max_size=40
    ),
    seed=st.integers(0, 99),
)
@settings(max_examples=60, deadline=None)
def test_groups_come_back_over_shards_and_files_in_any_order(
    users: list[tuple[int, int]], seed: int
) -> None:
    clients = 2 * GROUPS_PER_FILE + 5
    by_shard = [[group for shard, group in users if shard == number] for number in range(3)]
    pieces = [
        (part, piece)
        for shard, groups in enumerate(by_shard)
        for part, piece in split_groups(shard, np.array(groups, np.uint32))
    ]
    random.Random(seed).shuffle(pieces)
    with tempfile.TemporaryDirectory() as folder:
        for part in range(group_files(clients)):
            mine = [piece for number, piece in pieces if number == part]
            data = encode_groups(mine, groups_in_file(part, clients))
            Path(folder, groups_name(0, part, clients)).write_bytes(data)
        shards = [{"name": str(number), "users": len(some)} for number, some in enumerate(by_shard)]
        manifest = {"virtual_clients": clients, "groupings": 1, "shards": shards}
        write_json(Path(folder, "manifest.json"), STORE_SCHEMA, manifest)
        index = GroupIndex(as_committed(Path(folder)))
        every = [group for groups in by_shard for group in groups]
        for group in {0, clients - 1, *every}:
            expected = [row for row, one in enumerate(every) if one == group]
            assert index.members(0, group).tolist() == expected


@pytest.mark.parametrize("damage", ["missing", "cut", "another"])
def test_damaged_index_is_one_sentence(tmp_path: Path, folder: Path, damage: str) -> None:
    copy = tmp_path / "users"
    shutil.copytree(folder, copy)
    for path in (*copy.glob("*.arrow"), *copy.glob("*.parquet")):
        if damage == "missing":
            path.unlink()
        else:
            path.write_bytes(path.read_bytes()[:90] if damage == "cut" else b"another thing")
    index = GroupIndex(as_committed(copy))
    with pytest.raises(ArtifactError, match="run partition_users again"):
        index.members(0, 0)
    with pytest.raises(ArtifactError, match="run partition_users again"):
        _ = index.user_keys
