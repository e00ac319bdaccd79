"""Reads the output of `partition_users`: users by row, groups by number, examples as arrays.

`user_layout` defines the layout of a folder (`users/` or `evaluation/`). Row numbers are global
over all shards in order. Everything here is Raw.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from fedemb.data.group_index import GroupIndex, damaged, read_index
from fedemb.data.pixels import decode_pngs
from fedemb.data.records import UserRecord, decode_user
from fedemb.data.user_layout import read_manifest
from fedemb.data.verified_folder import VerifiedFolder
from fedemb.errors import ArtifactError

if TYPE_CHECKING:
    from array_record.python.array_record_module import ArrayRecordReader

__all__ = ["GroupIndex", "UserStore", "load_examples"]

_READER_OPTIONS = "readahead_buffer_size:0,max_parallelism:0"


class UserStore:
    """Random access to user records over sharded ArrayRecord files. Safe to use from threads."""

    def __init__(self, folder: VerifiedFolder):
        """Opens a folder; reads its manifest and index, no images.

        Args:
          folder: `users/` or `evaluation/` of a run.

        Raises:
          ArtifactError: the folder is incomplete, damaged, or of another schema version.
        """
        self.path = folder.path
        self.manifest = read_manifest(self.path)
        self.image_size = self.manifest["image_size"]
        self.channels = self.manifest["channels"]
        sizes = [shard["users"] for shard in self.manifest["shards"]]
        self._starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        self._readers: dict[int, ArrayRecordReader] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Returns the number of users. Private."""
        return int(self._starts[-1])

    @cached_property
    def user_keys(self) -> np.ndarray:
        """Returns the keyed hashes of the users, uint64 [users], ascending: the order of rows."""
        return read_index(self.path, self.manifest["shards"], "user_key", np.uint64)

    @cached_property
    def image_counts(self) -> np.ndarray:
        """Returns the number of images of each user, uint32 [users]."""
        return read_index(self.path, self.manifest["shards"], "images", np.uint32)

    def read(self, rows: Sequence[int] | np.ndarray) -> list[UserRecord]:
        """Reads users by row, in the requested order.

        Raises:
          IndexError: a row does not exist.
          ArtifactError: a shard is missing or damaged.
        """
        wanted = np.asarray(rows, np.int64)
        if wanted.size == 0:
            return []
        if wanted.min() < 0 or wanted.max() >= len(self):
            raise IndexError(f"row {int(wanted.max())} of {len(self)} users")
        records: list[UserRecord | None] = [None] * len(wanted)
        shards = np.searchsorted(self._starts, wanted, side="right") - 1
        for shard in np.unique(shards):
            places = np.flatnonzero(shards == shard)
            local = (wanted[places] - self._starts[shard]).tolist()
            with self._lock:
                reader = self._reader(int(shard))
                try:
                    data = reader.read(local)
                except (RuntimeError, IndexError) as error:
                    raise damaged(self._name(int(shard)), "is damaged") from error
            for place, one in zip(places.tolist(), data, strict=True):
                records[place] = decode_user(one)
        return [record for record in records if record is not None]

    def _name(self, shard: int) -> str:
        return self.manifest["shards"][shard]["name"]

    def _reader(self, shard: int) -> ArrayRecordReader:
        reader = self._readers.get(shard)
        if reader is None:
            from array_record.python.array_record_module import ArrayRecordReader

            reader = ArrayRecordReader(str(self.path / self._name(shard)), _READER_OPTIONS)
            expected = int(self._starts[shard + 1] - self._starts[shard])
            if not reader.ok() or reader.num_records() != expected:
                raise damaged(self._name(shard), "is missing, cut or of another run")
            self._readers[shard] = reader
        return reader


def load_examples(
    store: UserStore,
    rows: Sequence[int] | np.ndarray,
    *,
    max_examples: int,
    image_size: int,
    channels: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Loads the images of users as arrays, in an order that does not depend on other users.

    If there are more than `max_examples`, `choose_examples` selects them. The images of a user are
    in keyed-hash order.

    Args:
      store: the users.
      rows: users of one virtual client; their order does not matter.
      max_examples: maximum number of examples returned.
      image_size: height and width in pixels; must match the store.
      channels: 1 or 3; must match the store.

    Returns:
      images: uint8 [examples, image_size, image_size, channels].
      labels: int64 [examples].

    Raises:
      ArtifactError: the store has images of another size, or is damaged.
    """
    if (store.image_size, store.channels) != (image_size, channels):
        raise ArtifactError(
            f"The users have images of {store.image_size}x{store.image_size}x{store.channels}, "
            f"and the model expects {image_size}x{image_size}x{channels}. Run partition_users "
            "with this configuration."
        )
    users = store.read(np.sort(np.asarray(rows, np.int64)))
    places = choose_examples([len(user.images) for user in users], max_examples)
    images = [users[row].images[turn] for row, turn in places]
    labels = [users[row].labels[turn] for row, turn in places]
    return decode_pngs(images, image_size, channels), np.asarray(labels, np.int64)


def choose_examples(counts: Sequence[int], max_examples: int) -> list[tuple[int, int]]:
    """Selects the training images of a virtual client that has too many.

    The first image of every user is selected before the second image of any user, so that a user
    with many images does not displace others.

    Args:
      counts: number of images of each user.
      max_examples: maximum number of images selected.

    Returns:
      Pairs of user and image, ascending.

    >>> choose_examples([3, 1], max_examples=3)
    [(0, 0), (0, 1), (1, 0)]
    """
    places = [(turn, user) for user, count in enumerate(counts) for turn in range(count)]
    return sorted((user, turn) for turn, user in sorted(places)[:max_examples])
