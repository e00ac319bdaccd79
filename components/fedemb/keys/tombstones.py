"""Users who asked to be forgotten: keyed marks that every later partition honours.

Tombstones lie at `<storage.tombstones>/<policy_id>/`. A tombstone is the keyed hash of a user key,
so whoever lists the store learns how many there are and nothing about whom; and as each policy has
a key of its own, another policy cannot read them: there the ids are given again. There are few
compared with users: each worker reads them all.

Only the data owner writes here, by `bury`; the steps look, and need no right but to read. The key
store knows how many there are at least: with the n-th a key of this number is created and destroyed
at once, and a name is used once. So a single tombstone that was lost is noticed, and a store
restored from an old backup, but not one that was exchanged for another.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress

from fedemb.errors import StorageError
from fedemb.keys.keys import KeyStore, derive, partition_key
from fedemb.storage import open_store

_MARK = "tombstones.mark"
"""Says which policy key the tombstones beside it were made with."""


def check_tombstones(uri: str | None, keys: KeyStore, policy_id: str) -> None:
    """Refuses tombstones that are not the policy's own, not whole, or fewer than another policy's.

    An empty folder looks like a world in which nobody asked to be forgotten; so does a new policy.

    Raises:
      StorageError: the store is missing, another one, lacks a tombstone, is not named although the
        policy has one, or holds more tombstones of another policy than of this one.
    """
    if uri is None:
        if keys.used(_count(policy_id, 1)):
            raise StorageError(
                f"policy {policy_id!r} has tombstones and storage.tombstones is null, so users who "
                "asked to be forgotten would train again; name their store"
            )
        return
    store = open_store(uri)
    folders = (name.split("/") for name in store.list())
    held = Counter(path[0] for path in folders if len(path) == 2 and path[1] != _MARK)
    mine = held.pop(policy_id, 0)
    if mine:
        _require_mark(uri, keys, policy_id)
    if keys.used(_count(policy_id, mine + 1)):
        raise StorageError(
            f"{store.uri} holds {mine} tombstones of policy {policy_id!r}, and there were more: "
            "users who asked to be forgotten would train again; mount or restore it, name the "
            "right store, or forget whom it lost again with `fedemb forget --lost`"
        )
    more = sorted(other for other, number in held.items() if number > mine)
    if more:
        raise StorageError(
            f"{store.uri} holds {mine} tombstones of policy {policy_id!r} and {held[more[0]]} of "
            f"{more[0]!r}: users who asked to be forgotten would train again, because tombstones "
            "are keyed and count in their own policy only; give each of their ids to `fedemb "
            "forget` under this policy too. A policy of other people needs a storage.tombstones "
            "of its own"
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
    store = open_store(uri)
    before = len(read_tombstones(uri, policy_id))
    if not lost and keys.used(_count(policy_id, before + 1)):
        raise StorageError(
            f"{store.uri} holds {before} tombstones of policy {policy_id!r}, and there were more; "
            "nobody was forgotten: mount or restore it, name the right store, or, if this user's "
            "was one it lost, say --lost"
        )
    with suppress(FileExistsError):
        store.create(f"{policy_id}/{_MARK}", _mark(keys, policy_id))
    _require_mark(uri, keys, policy_id)
    fresh = True
    try:
        store.create(f"{policy_id}/{tombstone}", b"")
    except FileExistsError:
        fresh = False
    number = len(read_tombstones(uri, policy_id))
    while number and not keys.used(_count(policy_id, number)):
        with suppress(FileExistsError):  # another process counts at this moment
            keys.create(_count(policy_id, number))
        keys.destroy(_count(policy_id, number))
        number -= 1
    return fresh


def read_tombstones(uri: str | None, policy_id: str) -> frozenset[str]:
    """Returns all tombstones of a policy; none if there is no store of them.

    Raises:
      StorageError: the store cannot be read. A partition that cannot read it must not go on.
    """
    if uri is None:
        return frozenset()
    folder = f"{policy_id}/"
    return frozenset(name.removeprefix(folder) for name in open_store(uri).list(folder)) - {_MARK}


def _require_mark(uri: str, keys: KeyStore, policy_id: str) -> None:
    store = open_store(uri)
    name = f"{policy_id}/{_MARK}"
    if not store.exists(name) or store.read(name) != _mark(keys, policy_id):
        raise StorageError(
            f"{store.uri} does not hold the tombstones of this policy {policy_id!r}, but of one "
            "with another key, so users who asked to be forgotten would train again; mount or "
            "restore it, or name the right store"
        )


def _mark(keys: KeyStore, policy_id: str) -> bytes:
    return derive(partition_key(keys, policy_id), "tombstones").hex().encode()


def _count(policy_id: str, number: int) -> str:
    return f"tombstones/{policy_id}+{number}"
