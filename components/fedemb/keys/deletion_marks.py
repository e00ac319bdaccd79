"""Deletion markers: keyed markers of users who requested deletion. Later partitions skip them.

Deletion markers are stored at `<storage.deletion_marks>/<policy_id>/`. A marker is the keyed hash
of a user key, so a listing of the store shows the number of markers and nothing about the users.
Each policy has a separate key and cannot read the markers of another policy; user IDs must be
passed again for each policy. The number of markers is small compared with users, and each worker
reads all of them.

Only the data owner writes markers, with `mark_deleted`; steps only read them. The key store records
the minimum number of markers: with the n-th marker a key with this number is created and destroyed
at once, and a key name is used only once. So a lost marker and a store restored from an old backup
are detected, but a marker that was exchanged for another is not.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress

from fedemb.errors import StorageError
from fedemb.keys import KeyStore, derive, partition_key
from fedemb.storage import open_store

_OWNER = "policy.key"
"""File that identifies the policy key of the deletion markers in the same folder."""
_CONSEQUENCE = "Deleted users would train again."


def check_deletion_marks(uri: str | None, keys: KeyStore, policy_id: str) -> None:
    """Refuses a deletion marker store that is incomplete or belongs to another policy.

    This check is needed because an empty folder or a new policy looks as if no user had requested
    deletion.

    Raises:
      StorageError: the store is missing, belongs to another policy key, lacks a marker, is not
        configured although the policy has one, or holds more markers of another policy than of this
        policy.
    """
    if uri is None:
        if keys.used(_count(policy_id, 1)):
            raise StorageError(
                f"policy {policy_id!r} has deletion markers, but storage.deletion_marks is null. "
                f"{_CONSEQUENCE} Set storage.deletion_marks to their store"
            )
        return
    store = open_store(uri)
    folders = (name.split("/") for name in store.list())
    held = Counter(path[0] for path in folders if len(path) == 2 and path[1] != _OWNER)
    mine = held.pop(policy_id, 0)
    if mine:
        _require_owner(uri, keys, policy_id)
    if keys.used(_count(policy_id, mine + 1)):
        raise StorageError(  # the number of deleted users must not appear in a log
            f"deletion markers of policy {policy_id!r} are missing in {store.uri}. {_CONSEQUENCE} "
            "Restore the store or set the right one, or delete the affected users again by "
            "`fedemb forget --lost`"
        )
    more = sorted(other for other, number in held.items() if number > mine)
    if more:
        raise StorageError(
            f"{store.uri} has more deletion markers of {more[0]!r} than of policy {policy_id!r}, "
            f"and a marker applies to its own policy only. {_CONSEQUENCE} Run `fedemb forget` for "
            "each of their ids under this policy. If the policies have different users, set "
            "another storage.deletion_marks"
        )


def mark_deleted(
    uri: str, keys: KeyStore, policy_id: str, mark: str, *, lost: bool = False
) -> bool:
    """Writes a deletion marker, see `Hasher.deletion_mark`; returns whether it is new.

    The marker is written before its number. If the process is killed in between, the next call adds
    the missing number. `lost` states that the store lacks markers, of which this is one.

    Raises:
      StorageError: the store cannot be written, belongs to another policy key, or lacks markers
        although `lost` is false.
    """
    store = open_store(uri)
    before = len(read_deletion_marks(uri, policy_id))
    if not lost and keys.used(_count(policy_id, before + 1)):
        raise StorageError(
            f"deletion markers of policy {policy_id!r} are missing: {store.uri} has {before}, and "
            "more were created. Nothing was changed. Restore the store or pass the right one; if "
            "the marker of this user is lost, pass --lost"
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
        keys.destroy(_count(policy_id, number))  # an earlier call may have been killed
    for each in reversed(missing):  # ascending: no gap in the count if killed
        with suppress(FileExistsError):  # another process counts concurrently
            keys.create(_count(policy_id, each))
        keys.destroy(_count(policy_id, each))
    return fresh


def read_deletion_marks(uri: str | None, policy_id: str) -> frozenset[str]:
    """Returns all deletion markers of a policy; an empty set if no store is configured.

    Raises:
      StorageError: the store cannot be read. The partition must then stop.
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
            f"the deletion markers in {store.uri} belong to a policy with another key than "
            f"{policy_id!r}. {_CONSEQUENCE} Restore the store, or set the right one"
        )


def _owner(keys: KeyStore, policy_id: str) -> bytes:
    return derive(partition_key(keys, policy_id), "deletion_marks").hex().encode()


def _count(policy_id: str, number: int) -> str:
    return f"deletion_marks/{policy_id}+{number}"
