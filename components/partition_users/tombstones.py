"""Users who asked to be forgotten: keyed marks that every later partition honours.

A tombstone is the keyed hash of a user key, so whoever lists the store learns how many there are
and nothing about whom. There are few compared with users: each worker reads them all.
"""

from __future__ import annotations

from contextlib import suppress

from components.fedemb.errors import StorageError
from components.fedemb.privacy.keys import KeyStore, derive, partition_key
from components.fedemb.storage import open_store
from components.partition_users.hashing import Hasher

_MARK = "tombstones.mark"
"""Says whose tombstones these are; a folder that was lost, or not mounted, has none."""


def check_store(uri: str | None, keys: KeyStore, policy_id: str) -> None:
    """Refuses a store of tombstones that is not the policy's own; marks it at its first use.

    An empty folder looks like a world in which nobody asked to be forgotten. Once a policy has a
    store of tombstones, its key store remembers so.

    Raises:
      StorageError: the store is missing, another one, or not named although the policy has one.
    """
    known = f"tombstones/{policy_id}"
    if uri is None:
        if keys.exists(known):
            raise StorageError(
                f"policy {policy_id!r} has a store of tombstones and storage.tombstones is null, "
                "so users who asked to be forgotten would train again; name the store"
            )
        return
    store = open_store(uri)
    mark = derive(partition_key(keys, policy_id), "tombstones").hex().encode()
    if not keys.exists(known):
        with suppress(FileExistsError):
            store.create(_MARK, mark)
    if not store.exists(_MARK) or store.read(_MARK) != mark:
        raise StorageError(
            f"{store.uri} does not hold the tombstones of policy {policy_id!r}, so users who asked "
            "to be forgotten would train again; mount or restore it, or name the right store"
        )
    with suppress(FileExistsError):
        keys.create(known)


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
    return frozenset() if uri is None else frozenset(open_store(uri).list()) - {_MARK}
