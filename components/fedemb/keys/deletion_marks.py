"""Users who asked to be forgotten: keyed marks that every later partition honours.

Deletion marks lie at `<storage.deletion_marks>/<policy_id>/`. A mark is the keyed hash of a user
key: whoever lists the store learns how many there are and nothing about the users. Each policy has
a key of its own, so another policy cannot read them: there the ids are given again. There are few
compared with users, and each worker reads them all.

Only the data owner writes here, by `mark_deleted`; the steps only read. The key store knows how
many there are at least: with the n-th mark a key of this number is created and destroyed at once,
and a name is used once. So one lost mark is noticed, and a store restored from an old backup, but
not one that was exchanged for another.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress

from fedemb.errors import StorageError
from fedemb.keys import KeyStore, derive, partition_key
from fedemb.storage import open_store

_OWNER = "policy.key"
"""Says which policy key the deletion marks beside it were made with."""
_CONSEQUENCE = "users who asked to be forgotten would train again"


def check_deletion_marks(uri: str | None, keys: KeyStore, policy_id: str) -> None:
    """Refuses marks of another policy key, a store that lost some, and one with more of others.

    An empty folder looks like a world in which nobody asked to be forgotten; so does a new policy.

    Raises:
      StorageError: the store is missing, another one, lacks a mark, is not named although the
        policy has one, or holds more marks of another policy than of this one.
    """
    if uri is None:
        if keys.used(_count(policy_id, 1)):
            raise StorageError(
                f"policy {policy_id!r} has deletion marks and storage.deletion_marks is null, so "
                f"{_CONSEQUENCE}; name their store"
            )
        return
    store = open_store(uri)
    folders = (name.split("/") for name in store.list())
    held = Counter(path[0] for path in folders if len(path) == 2 and path[1] != _OWNER)
    mine = held.pop(policy_id, 0)
    if mine:
        _require_owner(uri, keys, policy_id)
    if keys.used(_count(policy_id, mine + 1)):
        raise StorageError(  # how many were forgotten is told to whoever forgets, and to no log
            f"{store.uri} lacks deletion marks of policy {policy_id!r}: {_CONSEQUENCE}; mount or "
            "restore it, name the right store, or forget the lost users again with `fedemb forget "
            "--lost`"
        )
    more = sorted(other for other, number in held.items() if number > mine)
    if more:
        raise StorageError(
            f"{store.uri} holds more deletion marks of {more[0]!r} than of policy {policy_id!r}: "
            f"{_CONSEQUENCE}, because deletion marks are keyed and count in their own policy only; "
            "give each of their ids to `fedemb forget` under this policy too. A policy of other "
            "people needs a storage.deletion_marks of its own"
        )


def mark_deleted(
    uri: str, keys: KeyStore, policy_id: str, mark: str, *, lost: bool = False
) -> bool:
    """Writes a deletion mark, see `Hasher.deletion_mark`; returns whether it is new.

    First the mark, then its number: killed in between, the next one makes up for it.

    Args:
      uri: the store.
      keys: key store of the policy.
      policy_id: whose store.
      mark: its name.
      lost: the store is known to lack marks and this is one of them.

    Raises:
      StorageError: the store cannot be written, is another one, or lacks marks unawares.
    """
    store = open_store(uri)
    before = len(read_deletion_marks(uri, policy_id))
    if not lost and keys.used(_count(policy_id, before + 1)):
        raise StorageError(
            f"{store.uri} holds {before} deletion marks of policy {policy_id!r}, and there were "
            "more; nothing was changed: mount or restore it, name the right store, or, if this "
            "user's was one it lost, say --lost"
        )
    with suppress(FileExistsError):
        store.create(f"{policy_id}/{_OWNER}", _owner(keys, policy_id))
    _require_owner(uri, keys, policy_id)
    fresh = True
    try:
        store.create(f"{policy_id}/{mark}", b"")
    except FileExistsError:
        fresh = False
    number = len(read_deletion_marks(uri, policy_id))
    missing: list[int] = []
    while number and not keys.used(_count(policy_id, number)):
        missing.append(number)
        number -= 1
    if number:
        keys.destroy(_count(policy_id, number))  # somebody may have been killed before that
    for each in reversed(missing):  # upwards: what is counted has no gap, whoever is killed
        with suppress(FileExistsError):  # another process counts at this moment
            keys.create(_count(policy_id, each))
        keys.destroy(_count(policy_id, each))
    return fresh


def read_deletion_marks(uri: str | None, policy_id: str) -> frozenset[str]:
    """Returns all deletion marks of a policy; none if there is no store of them.

    Raises:
      StorageError: the store cannot be read. A partition that cannot read it must not go on.
    """
    if uri is None:
        return frozenset()
    folder = f"{policy_id}/"
    return frozenset(name.removeprefix(folder) for name in open_store(uri).list(folder)) - {_OWNER}


def _require_owner(uri: str, keys: KeyStore, policy_id: str) -> None:
    store = open_store(uri)
    name = f"{policy_id}/{_OWNER}"
    if not store.exists(name) or store.read(name) != _owner(keys, policy_id):
        raise StorageError(
            f"{store.uri} does not hold the deletion marks of this policy {policy_id!r}, but of "
            f"one with another key, so {_CONSEQUENCE}; mount or restore it, or name the right store"
        )


def _owner(keys: KeyStore, policy_id: str) -> bytes:
    return derive(partition_key(keys, policy_id), "deletion_marks").hex().encode()


def _count(policy_id: str, number: int) -> str:
    return f"deletion_marks/{policy_id}+{number}"
