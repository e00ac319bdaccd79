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

from fedemb.data.builtin import ArrayUsers
from fedemb.data.client_data import (
    GROUPS_PER_FILE,
    STORE_SCHEMA,
    GroupIndex,
    UserStore,
    VerifiedFolder,
    encode_groups,
    group_files,
    groups_in_file,
    groups_name,
    load_examples,
    split_groups,
)
from fedemb.data.records import UserRecord, decode_user, encode_example, encode_user
from fedemb.errors import ArtifactError, InputError
from fedemb.foundation.document import write_json
from tests.kit.pipeline_runs.partition_run import SIZE, Partitioner, rows_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    partition = Partitioner(tmp_path_factory.mktemp("users"))
    return partition(rows_of(40, images=5), partition__shards=3).root / "users"


def test_rows_are_sorted_by_user_key_over_all_shards(folder: Path) -> None:
    store = UserStore(VerifiedFolder(folder))
    records = store.read(range(len(store)))
    assert [record.user_key for record in records] == store.user_keys.tolist()
    assert (np.diff(store.user_keys.astype(object)) > 0).all()
    assert store.image_counts.tolist() == [len(record.images) for record in records]
    assert GroupIndex(VerifiedFolder(folder)).user_keys.tolist() == store.user_keys.tolist()


def test_users_are_read_in_the_order_asked_for_from_many_threads(folder: Path) -> None:
    store = UserStore(VerifiedFolder(folder))
    everyone = store.read(range(len(store)))
    orders = [np.random.default_rng(n).integers(0, len(store), 30) for n in range(8)]
    with ThreadPoolExecutor(4) as pool:
        for order, records in zip(orders, pool.map(store.read, orders), strict=True):
            assert records == [everyone[row] for row in order]
    assert store.read([]) == []


def test_examples_do_not_depend_on_the_order_of_rows(folder: Path) -> None:
    store = UserStore(VerifiedFolder(folder))
    size = {"image_size": SIZE, "channels": 1}
    images, labels = load_examples(store, [7, 3, 5], max_examples=100, **size)
    again, same = load_examples(store, [3, 5, 7], max_examples=100, **size)
    np.testing.assert_array_equal(images, again)
    np.testing.assert_array_equal(labels, same)
    assert images.shape == (15, SIZE, SIZE, 1)
    assert labels.dtype == np.int64
    assert labels.tolist() == [label for user in store.read([3, 5, 7]) for label in user.labels]


def test_truncation_keeps_images_of_every_user(folder: Path) -> None:
    store = UserStore(VerifiedFolder(folder))
    users = store.read([3, 5, 7])
    _, labels = load_examples(store, [3, 5, 7], max_examples=7, image_size=SIZE, channels=1)
    kept = [users[0].labels[:3], users[1].labels[:2], users[2].labels[:2]]
    assert labels.tolist() == [label for some in kept for label in some]


def test_images_of_another_size_are_refused(folder: Path) -> None:
    with pytest.raises(ArtifactError, match=r"8x8x1.*99x99x1.*partition_users"):
        load_examples(
            UserStore(VerifiedFolder(folder)), [0], max_examples=9, image_size=99, channels=1
        )


@pytest.mark.parametrize("damage", ["missing", "cut", "another"])
@pytest.mark.parametrize(
    ("files", "read"),
    [
        ("*.arrayrecord", lambda users: UserStore(users).read(range(5))),
        ("*.arrow", lambda users: GroupIndex(users).members(0, 0)),
        ("*.parquet", lambda users: GroupIndex(users).user_keys),
    ],
)
def test_damaged_users_file_is_refused(tmp_path: Path, folder: Path, files, read, damage) -> None:
    copy = shutil.copytree(folder, tmp_path / "users")
    for path in copy.glob(files):
        whole = path.read_bytes()
        path.unlink()
        if damage != "missing":
            path.write_bytes(whole[:90] if damage == "cut" else b"another thing")
    with pytest.raises(ArtifactError, match="run partition_users again"):
        read(VerifiedFolder(copy))


def test_incomplete_partition_folder_is_an_artifact_error(tmp_path: Path) -> None:
    for opened in (UserStore, GroupIndex):
        with pytest.raises(ArtifactError):
            opened(VerifiedFolder(tmp_path))


@given(
    users=st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 2 * GROUPS_PER_FILE + 4)), max_size=40
    ),
    seed=st.integers(0, 99),
)
@settings(max_examples=60, deadline=None)
def test_groups_are_read_over_shards_in_any_order(users: list[tuple[int, int]], seed: int) -> None:
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
        index = GroupIndex(VerifiedFolder(Path(folder)))
        every = [group for groups in by_shard for group in groups]
        for group in {0, clients - 1, *every}:
            expected = [row for row, one in enumerate(every) if one == group]
            assert index.members(0, group).tolist() == expected


# ---- Users in memory are grouped as on disk: by a keyed hash of their own id and nothing else ----


KEY = bytes(range(32))


def arrays(owners):
    owners = np.asarray(owners)
    images = np.zeros((len(owners), 8, 8, 1), np.uint8)
    images[:, 0, 0, 0] = np.arange(len(owners)) % 251
    return images, np.arange(len(owners)) % 3, owners


SIZES = {"virtual_clients": 5, "groupings": 3, "key": KEY}


def grouped(owners):
    """User ids of each virtual client, by grouping, and the clients' images."""
    images, labels, users = arrays(owners)
    found, clients = ArrayUsers(images, labels, users, **SIZES), {}
    for grouping in range(3):
        for group in range(5):
            pixels, _ = found.examples(found.members(grouping, group), 10_000)
            clients[grouping, group] = sorted(users[p] for p in pixels[:, 0, 0, 0].tolist())
    return clients


@given(st.lists(st.integers(0, 40), min_size=2, max_size=100), st.data())
def test_removing_a_user_changes_one_virtual_client_per_grouping(owners, data):
    gone = data.draw(st.sampled_from(owners))
    before = grouped(owners)
    # The same places for the rest: pixels name places in the whole array.
    images, labels, users = arrays(owners)
    keep = users != gone
    if not keep.any():
        return
    rest = ArrayUsers(images[keep], labels[keep], users[keep], **SIZES)
    for grouping in range(3):
        changed = 0
        for group in range(5):
            pixels, _ = rest.examples(rest.members(grouping, group), 10_000)
            after = sorted(users[p] for p in pixels[:, 0, 0, 0].tolist())
            assert after == [one for one in before[grouping, group] if one != gone]
            changed += after != before[grouping, group]
        assert changed == 1


def test_text_user_ids_are_grouped_alike_in_any_image_order():
    owners = np.array(["ada", "ben", "ada", "cleo", "ben"])
    images, labels, _ = arrays(owners)
    shuffled = np.array([3, 0, 4, 2, 1])
    sizes = {"virtual_clients": 2, "groupings": 1, "key": KEY}
    one = ArrayUsers(images, labels, owners, **sizes)
    two = ArrayUsers(images[shuffled], labels[shuffled], owners[shuffled], **sizes)
    assert one.user_count == 3
    assert np.array_equal(one.user_keys, two.user_keys)
    assert (np.diff(one.user_keys.astype(object)) > 0).all()
    assert all(np.array_equal(one.members(0, g), two.members(0, g)) for g in range(2))


def test_cap_keeps_first_images_of_all_users_before_second_ones():
    images, labels, users = arrays([0, 0, 0, 0, 1])
    found = ArrayUsers(images, labels, users, virtual_clients=1, groupings=1, key=KEY)
    pixels, classes = found.examples(found.members(0, 0), 2)
    assert sorted(users[pixels[:, 0, 0, 0]]) == [0, 1]
    assert len(classes) == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"images": np.zeros((4, 8, 8, 1), np.float32)}, "images are float32"),
        ({"images": np.zeros((4, 8, 6, 1), np.uint8)}, "wanted uint8"),
        ({"labels": np.zeros(3, int)}, r"^labels must have the shape \(4,\), got \(3,\)"),
        ({"labels": np.zeros(4)}, "^Labels must be whole numbers.* got float64"),
        ({"users": np.zeros((4, 2), int)}, r"^users must have the shape \(4,\), got \(4, 2\)"),
    ],
)
def test_arrays_of_wrong_shape_or_dtype_are_refused(change, message):
    images, labels, users = arrays([0, 1, 1, 2])
    given_ = {"images": images, "labels": labels, "users": users} | change
    with pytest.raises(InputError, match=message):
        ArrayUsers(**given_, virtual_clients=2, groupings=1, key=KEY)


# ---- User records survive the way through a file, and ids have one spelling ----


records = st.integers(0, 5).flatmap(
    lambda size: st.builds(
        UserRecord,
        user_key=st.integers(0, 2**64 - 1),
        images=st.tuples(*[st.binary(max_size=9)] * size),
        labels=st.tuples(*[st.integers(-(2**63), 2**63 - 1)] * size),
        subgroup=st.text(st.characters(codec="utf-8"), max_size=5),
        block=st.text(st.characters(codec="utf-8"), max_size=5),
    )
)


@given(records)
def test_user_record_is_read_back_and_has_one_encoding(record: UserRecord) -> None:
    data = encode_user(record)
    assert decode_user(data) == record
    assert encode_user(decode_user(data)) == data


@pytest.mark.parametrize("data", [b"", b"\xff\xffjunk", encode_example({"images": [b"x"]})])
def test_invalid_user_record_is_an_artifact_error(data: bytes) -> None:
    with pytest.raises(ArtifactError, match="user record"):
        decode_user(data)
