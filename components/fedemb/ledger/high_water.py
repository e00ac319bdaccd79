"""Rollback detection: high-water markers outside the ledger reveal a restored older ledger.

A backup of a ledger has valid signatures and a valid chain, but lacks the budget spent since. For
the n-th record that charges a run or adds trusted keys, a marker with the number n is therefore
created in the key store, and in the rollback anchor if `storage.rollback_anchor` is set. A marker
is never replaced and holds the SHA-256 of the signed record. A ledger with fewer such records than
markers, or with a different record at the newest marker, is refused before any charge. The marker
is created before the root key of the reservation, so no run trains without a marker.

Limits: a rollback of ledger and key store together is not detected, unless the rollback anchor is
    in a store where the attacker cannot write (a bucket with a locked retention policy). A rollback
    of all three stores is not detected. Records after the newest marker bind, commit, void or
    release; without these records the ledger charges the same amount or more. The key store also
    records that a run was bound (`keys.unbound_key_name`), so a ledger that lost the bind record
    neither refunds the charge nor binds the run to other inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from fedemb.errors import LedgerError, Refused
from fedemb.keys import KeyStore
from fedemb.ledger.ledger import Ledger
from fedemb.ledger.records import Record
from fedemb.ledger.terms import rollback_anchor_sha
from fedemb.storage import open_store

MARKED_KINDS = ("policy", "reserve", "keys", "approvers", "charge")


def check_high_water(
    ledger: Ledger, keys: KeyStore | None, rollback_anchor: str | None = None
) -> int:
    """Verifies that the ledger is not older than its markers and matches them.

    Args:
      ledger: the ledger; refreshed here if a marker is ahead, because another run may have
          reserved.
      keys: key store of the ledger; None checks only the rollback anchor.
      rollback_anchor: store of the rollback anchor, or None.

    Returns: The number of records that have a marker in some store.

    Raises:
      LedgerError: the ledger was restored to an older state, or rewritten.
      StorageError: a store cannot be read.
    """
    return max(
        [_check(ledger, place) for place in _places(ledger, keys, rollback_anchor)], default=0
    )


def find_rollback_anchor(ledger: Ledger, given: Sequence[str]) -> str | None:
    """Returns the policy's rollback anchor among the given stores, or None if it has none.

    If the policy does not fix a rollback anchor, the first given store is returned.

    Raises:
      Refused: the policy fixes a rollback anchor that is not among the given stores.
    """
    named = ledger.terms.rollback_anchor_sha
    if not named:
        return given[0] if given else None
    for uri in given:
        if rollback_anchor_sha(ledger.policy_id, uri) == named:
            return uri
    raise Refused(
        f"policy {ledger.policy_id!r} has a rollback anchor for life, and "
        f"{'another store was' if given else 'none was'} named; pass --rollback-anchor with the "
        "storage.rollback_anchor of its runs"
    )


def mark_high_water(ledger: Ledger, keys: KeyStore, rollback_anchor: str | None = None) -> None:
    """Creates missing markers, oldest first, so that an interruption leaves no gap.

    Raises:
      LedgerError: markers of a different ledger were created meanwhile.
      StorageError: a store cannot be written.
    """
    for place in _places(ledger, keys, rollback_anchor):
        marked = _marked(ledger)
        newest = len(marked)
        while newest and not place.holds(newest):
            newest -= 1
        for number, record in enumerate(marked[newest:], newest + 1):
            with suppress(FileExistsError):  # another run of the policy may create the same marker
                place.create(number, record.sha)
        _check(ledger, place)


@dataclass(frozen=True)
class _Place:
    """A store of markers by number; each marker holds the SHA-256 of its record."""

    name: str
    holds: Callable[[int], bool]
    read: Callable[[int], str]
    create: Callable[[int, str], None]


def _places(ledger: Ledger, keys: KeyStore | None, rollback_anchor: str | None) -> Iterator[_Place]:
    policy = ledger.policy_id
    if keys is not None:
        yield _Place(
            f"the key store {keys.uri}",
            holds=lambda number: keys.used(f"ledger/{policy}+{number}"),
            read=lambda number: keys.fetch(f"ledger/{policy}+{number}").hex(),
            create=lambda number, sha: _create_key(keys, f"ledger/{policy}+{number}", sha),
        )
    if rollback_anchor is not None:
        store = open_store(rollback_anchor)
        yield _Place(
            f"the rollback anchor {store.uri}",
            holds=lambda number: store.exists(f"{policy}/{number:08d}"),
            read=lambda number: store.read(f"{policy}/{number:08d}").decode(errors="replace"),
            create=lambda number, sha: store.create(f"{policy}/{number:08d}", sha.encode()),
        )


def _create_key(keys: KeyStore, name: str, sha: str) -> None:
    keys.create(name, bytes.fromhex(sha))


def _check(ledger: Ledger, place: _Place) -> int:
    """Compares the ledger with the markers of one store; returns the newest number, 0 if none."""
    marked = _marked(ledger)
    while place.holds(len(marked) + 1):
        ledger.refresh()
        before, marked = len(marked), _marked(ledger)
        if len(marked) == before:
            raise LedgerError(
                f"the ledger of policy {ledger.policy_id!r} in {ledger.chain.store.uri} is older "
                f"than its markers: it has {before} records that charge or name keys, and "
                f"{place.name} has more markers. Restore the newest ledger, or start a new "
                "policy_id and add up the epsilons of both policies"
            )
    number = len(marked)
    while number and not place.holds(number):  # killed before the marker was created
        number -= 1
    if number and place.read(number) != marked[number - 1].sha:
        raise LedgerError(
            f"ledger record {marked[number - 1].name} is not the one that {place.name} holds a "
            "mark of: it was rewritten; restore the ledger from its backup"
        )
    return number


def _marked(ledger: Ledger) -> list[Record]:
    return [record for record in ledger.chain.records if record.kind in MARKED_KINDS]
