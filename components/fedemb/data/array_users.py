"""In-memory counterpart of `UserStore` and `GroupIndex`, for simulations. Raw."""

from __future__ import annotations

from functools import cached_property

import numpy as np
from jaxtyping import Int, UInt8

from fedemb.data.client_data import choose_examples
from fedemb.data.hashing import KEY_BYTES, Hasher
from fedemb.errors import InputError


class ArrayUsers:
    """Images by user, and users by virtual client; a `sampling.Index`.

    A user's virtual clients depend only on the key and on the user's ID, as in a pipeline. So
    adding or removing a user does not affect other users (docs/privacy/sensitivity.md).

    >>> images = np.zeros((4, 8, 8, 1), np.uint8)
    >>> people = ArrayUsers(
    ...     images, np.array([5, 5, 6, 7]), np.array(["ada", "ada", "ben", "cleo"]),
    ...     virtual_clients=1, groupings=1, key=bytes(32))
    >>> _, labels = people.examples(people.members(grouping=0, group=0), max_examples=3)
    >>> sorted(labels.tolist())  # everyone's first image before anyone's second
    [5, 6, 7]

    Args:
      images: uint8 `[images, size, size, channels]`.
      labels: `[images]` whole numbers, any values.
      users: `[images]`, owner of each image: numbers or text.
      virtual_clients: number of virtual clients per grouping.
      groupings: number of independent groupings.
      key: key of the keyed hash.

    Raises:
      InputError: the shapes or types of the arrays do not match.
    """

    def __init__(
        self,
        images: np.ndarray,
        labels: np.ndarray,
        users: np.ndarray,
        *,
        virtual_clients: int,
        groupings: int,
        key: bytes,
    ) -> None:
        images, labels, users = (np.asarray(array) for array in (images, labels, users))
        check_images(images)
        for name, array in (("labels", labels), ("users", users)):
            if array.shape != (len(images),):
                raise InputError(
                    f"{name} must have the shape ({len(images)},), got {array.shape}. Pass one "
                    "value for each image."
                )
        if not np.issubdtype(labels.dtype, np.integer):
            raise InputError(
                f"Labels must be whole numbers, one per class, got {labels.dtype}. Convert the "
                "labels to integers."
            )
        self.virtual_clients, self.groupings = virtual_clients, groupings
        ids, owners = np.unique(users, return_inverse=True)
        hasher = Hasher(key)
        keys = [hasher.user_key(str(one)) for one in ids.tolist()]
        # Rows in the order of keys, which are big-endian words of 8 bytes.
        order = sorted(range(len(keys)), key=keys.__getitem__)
        keys = [keys[row] for row in order]
        self.user_count = len(ids)
        self.user_keys = np.frombuffer(b"".join(keys), f">u{KEY_BYTES}").astype(np.uint64)
        self._groups = np.stack(list(hasher.groups(keys, groupings, virtual_clients)))
        rows = np.empty(len(ids), np.int64)
        rows[order] = np.arange(len(ids))
        owners = rows[owners]
        by_user = np.argsort(owners, kind="stable")
        self.images, self.labels = images, labels.astype(np.int64)
        self._places = np.split(by_user, np.cumsum(np.bincount(owners))[:-1])

    @cached_property
    def classes(self) -> Int[np.ndarray, " classes"]:
        """Returns all labels, ascending."""
        return np.unique(self.labels)

    def members(self, grouping: int, group: int) -> Int[np.ndarray, " members"]:
        """Returns the rows of the users of one virtual client, ascending."""
        return np.flatnonzero(self._groups[grouping] == group)

    def examples(
        self, rows: Int[np.ndarray, " members"], max_examples: int
    ) -> tuple[UInt8[np.ndarray, "examples size size channels"], Int[np.ndarray, " examples"]]:
        """Returns at most `max_examples` images and labels, chosen as by `load_examples`."""
        places = [self._places[row] for row in rows]
        chosen = choose_examples([len(one) for one in places], max_examples)
        found = np.array([places[user][turn] for user, turn in chosen], np.int64)
        return self.images[found], self.labels[found]


def check_images(images: np.ndarray, size: int | None = None, channels: int | None = None) -> None:
    """Refuses arrays that are not square uint8 images of the given size and channels.

    Raises:
      InputError: the array has another type or shape.
    """
    square = images.ndim == 4 and images.shape[1] == images.shape[2] and images.dtype == np.uint8
    wanted = f"[n, {size or 'size'}, {size or 'size'}, {channels or 'channels'}]"
    if not square or (size and images.shape[1:] != (size, size, channels)):
        raise InputError(
            f"images are {images.dtype} {list(images.shape)}, wanted uint8 {wanted}; resize them, "
            "or set image_size and channels of the model"
        )
