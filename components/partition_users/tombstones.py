"""Users who asked to be forgotten: keyed marks that every later partition honours.

A tombstone is the keyed hash of a user key, so whoever lists the store learns how many there are
and nothing about whom. There are few compared with users: each worker reads them all.
"""

from __future__ import annotations

from components.fedemb.storage import open_store
from components.partition_users.hashing import Hasher


def bury(uri: str, hasher: Hasher, user_key: bytes) -> bool:
    """Writes the tombstone of a user; returns whether it is new.

    Raises:
      StorageError: the store cannot be written.
    """
    try:
        open_store(uri).create(hasher.tombstone(user_key), b"")
    except FileExistsError:
        return False
    return True


def read_tombstones(uri: str | None) -> frozenset[str]:
    """Returns all tombstones; none if there is no store of them.

    Raises:
      StorageError: the store cannot be read. A partition that cannot read it must not go on.
    """
    return frozenset() if uri is None else frozenset(open_store(uri).list())
