"""Users who asked to be forgotten: keyed marks that every later partition honours.

A tombstone is the keyed hash of a user key, so whoever lists the store learns how many there are
and nothing about whom. There are few compared with users: each worker reads them all.

The key store knows how many there are at least: with the n-th a key of this number is created and
destroyed at once, and a name is used once. So a single tombstone that was lost is noticed, and a
store restored from an old backup, but not one that was exchanged for another.
"""

from __future__ import annotations

from contextlib import suppress

from components.fedemb.errors import StorageError
from components.fedemb.privacy.keys import KeyStore, derive, partition_key
from components.fedemb.storage import open_store

_MARK = "tombstones.mark"
"""Says whose tombstones these are; a folder that was lost, or not mounted, has none."""


def check_store(uri: str | None, keys: KeyStore, policy_id: str) -> None:
    """Refuses a store of tombstones that is not the policy's own, or not whole; marks a new one.

    An empty folder looks like a world in which nobody asked to be forgotten. Once a policy has a
    store of tombstones, its key store remembers so.

    Raises:
      StorageError: the store is missing, another one, lacks a tombstone, or is not named although
        the policy has one.
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
    found = len(read_tombstones(uri))
    if keys.used(_count(policy_id, found + 1)):
        raise StorageError(
            f"{store.uri} holds {found} tombstones of policy {policy_id!r}, and there were more: "
            "users who asked to be forgotten would train again; restore it from its backup, or "
            "forget whom it lost again with `fedemb forget --lost`"
        )


def bury(uri: str, keys: KeyStore, policy_id: str, tombstone: str, *, lost: bool = False) -> bool:
    """Writes a tombstone, see `Hasher.tombstone`; returns whether it is new.

    First the tombstone, then its number: killed in between, the next one makes up for it.

    Args:
      uri: the store.
      keys: key store of the policy.
      policy_id: whose store.
      tombstone: its name.
      lost: the store is known to lack tombstones and this is one of them.

    Raises:
      StorageError: the store cannot be written, is another one, or lacks tombstones unawares.
    """
    if not lost:
        check_store(uri, keys, policy_id)
    fresh = True
    try:
        open_store(uri).create(tombstone, b"")
    except FileExistsError:
        fresh = False
    number = len(read_tombstones(uri))
    while number and not keys.used(_count(policy_id, number)):
        with suppress(FileExistsError):  # another process counts at this moment
            keys.create(_count(policy_id, number))
        keys.destroy(_count(policy_id, number))
        number -= 1
    return fresh


def _count(policy_id: str, number: int) -> str:
    return f"tombstones/{policy_id}+{number}"


def read_tombstones(uri: str | None) -> frozenset[str]:
    """Returns all tombstones; none if there is no store of them.

    Raises:
      StorageError: the store cannot be read. A partition that cannot read it must not go on.
    """
    return frozenset() if uri is None else frozenset(open_store(uri).list()) - {_MARK}
