"""Users in memory are grouped as on disk: by a keyed hash of their own id and nothing else."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedemb.data.builtin import ArrayUsers
from fedemb.errors import InputError

KEY = bytes(range(32))


def arrays(owners):
    owners = np.asarray(owners)
    images = np.zeros((len(owners), 8, 8, 1), np.uint8)
    images[:, 0, 0, 0] = np.arange(len(owners)) % 251
    return images, np.arange(len(owners)) % 3, owners


def grouped(owners, *, virtual_clients=5, groupings=3, key=KEY):
    """User ids of each virtual client, by grouping, and the clients' images."""
    images, labels, users = arrays(owners)
    found = ArrayUsers(
        images, labels, users, virtual_clients=virtual_clients, groupings=groupings, key=key
    )
    clients = {}
    for grouping in range(groupings):
        for group in range(virtual_clients):
            pixels, _ = found.examples(found.members(grouping, group), 10_000)
            clients[grouping, group] = sorted(users[p] for p in pixels[:, 0, 0, 0].tolist())
    return clients


@given(st.lists(st.integers(0, 40), min_size=2, max_size=100), st.data())
def test_a_user_less_changes_one_virtual_client_per_grouping(owners, data):
    gone = data.draw(st.sampled_from(owners))
    before = grouped(owners)
    # The same places for the rest: pixels name places in the whole array.
    images, labels, users = arrays(owners)
    keep = users != gone
    if not keep.any():
        return
    rest = ArrayUsers(
        images[keep], labels[keep], users[keep], virtual_clients=5, groupings=3, key=KEY
    )
    for grouping in range(3):
        changed = 0
        for group in range(5):
            pixels, _ = rest.examples(rest.members(grouping, group), 10_000)
            after = sorted(users[p] for p in pixels[:, 0, 0, 0].tolist())
            assert after == [one for one in before[grouping, group] if one != gone]
            changed += after != before[grouping, group]
        assert changed == 1


def test_ids_may_be_text_and_an_order_of_images_changes_nothing():
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


def test_a_cap_takes_every_users_first_image_before_any_second():
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
def test_arrays_that_do_not_fit_are_refused(change, message):
    images, labels, users = arrays([0, 1, 1, 2])
    given_ = {"images": images, "labels": labels, "users": users} | change
    with pytest.raises(InputError, match=message):
        ArrayUsers(**given_, virtual_clients=2, groupings=1, key=KEY)
