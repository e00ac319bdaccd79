"""How far a ledger came, written down outside of it: an older one put back in its place is refused.

A backup of a ledger is a true ledger, only older: its signatures and its chain hold, and what was
spent since is forgotten. So with the n-th record that charges a run or names trusted keys a mark of
that number is made in the key store, and, where `storage.witness` names a store, there too. A mark
is made once, never replaced, and holds the SHA-256 of the signed record. A ledger with fewer such
records than there are marks, or with another record at its newest mark, is refused before anything
is charged. The mark is made before the root key of the reservation: no run trains without it.

Not seen: ledger and key store put back together, unless a witness stands where whoever can do that
cannot write (a bucket with a locked retention policy); then not seen is what all three lost.
Records after the last mark bind, commit, void or release: without them a ledger charges as much, or
more. That a run was bound is in the key store, too (`keys.unbound_key_name`), so that a ledger
without the record neither gives its charge back nor binds it to other inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from fedemb.errors import LedgerError, Refused
from fedemb.keys import KeyStore
from fedemb.ledger.ledger import Ledger
from fedemb.ledger.records import Record
from fedemb.ledger.terms import witness_sha
from fedemb.storage import open_store

MARKED_KINDS = ("policy", "reserve", "keys", "approvers")


def check_high_water(ledger: Ledger, keys: KeyStore | None, witness_uri: str | None = None) -> int:
    """Refuses a ledger that is older than its marks, or another one than theirs.

    Args:
      ledger: refreshed here if a mark is ahead of it, as another run may just have reserved.
      keys: key store of the ledger; None asks the witness alone.
      witness_uri: store of the witness, if there is one.

    Returns:
      How many of its records are marked somewhere.

    Raises:
      LedgerError: the ledger was put back to an older state, or rewritten.
      StorageError: a store cannot be read.
    """
    return max([_check(ledger, place) for place in _places(ledger, keys, witness_uri)], default=0)


def find_witness(ledger: Ledger, given: Sequence[str]) -> str | None:
    """The witness of a policy among the stores that somebody names; None if it has none.

    A policy that named none for life takes the first.

    Raises:
      Refused: it named one for life, and that is not among them.
    """
    named = ledger.terms.witness_sha
    if not named:
        return given[0] if given else None
    for uri in given:
        if witness_sha(ledger.policy_id, uri) == named:
            return uri
    raise Refused(
        f"policy {ledger.policy_id!r} has a witness for life, and "
        f"{'another store was' if given else 'none was'} named; give --witness, the "
        "storage.witness of its runs"
    )


def mark_high_water(ledger: Ledger, keys: KeyStore, witness_uri: str | None = None) -> None:
    """Makes the marks that are missing, the oldest first: whenever it is killed none lies below.

    Raises:
      LedgerError: another ledger was marked meanwhile.
      StorageError: a store cannot be written.
    """
    for place in _places(ledger, keys, witness_uri):
        marked = _marked(ledger)
        newest = len(marked)
        while newest and not place.holds(newest):
            newest -= 1
        for number, record in enumerate(marked[newest:], newest + 1):
            with suppress(FileExistsError):  # another run of the policy marks at this moment
                place.create(number, record.sha)
        _check(ledger, place)


@dataclass(frozen=True)
class _Place:
    """Where marks stand, by number; what one says is the SHA-256 of its record."""

    name: str
    holds: Callable[[int], bool]
    read: Callable[[int], str]
    create: Callable[[int, str], None]


def _places(ledger: Ledger, keys: KeyStore | None, witness_uri: str | None) -> Iterator[_Place]:
    policy = ledger.policy_id
    if keys is not None:
        yield _Place(
            f"the key store {keys.uri}",
            holds=lambda number: keys.used(f"ledger/{policy}+{number}"),
            read=lambda number: keys.fetch(f"ledger/{policy}+{number}").hex(),
            create=lambda number, sha: _create_key(keys, f"ledger/{policy}+{number}", sha),
        )
    if witness_uri is not None:
        store = open_store(witness_uri)
        yield _Place(
            f"the witness {store.uri}",
            holds=lambda number: store.exists(f"{policy}/{number:08d}"),
            read=lambda number: store.read(f"{policy}/{number:08d}").decode(errors="replace"),
            create=lambda number, sha: store.create(f"{policy}/{number:08d}", sha.encode()),
        )


def _create_key(keys: KeyStore, name: str, sha: str) -> None:
    keys.create(name, bytes.fromhex(sha))


def _check(ledger: Ledger, place: _Place) -> int:
    """Compares with the marks of one place; returns the number of the newest, 0 if none."""
    marked = _marked(ledger)
    while place.holds(len(marked) + 1):
        ledger.refresh()
        before, marked = len(marked), _marked(ledger)
        if len(marked) == before:
            raise LedgerError(
                f"the ledger of policy {ledger.policy_id!r} in {ledger.chain.store.uri} holds "
                f"{before} records that charge or name keys, and {place.name} says there were "
                "more: an older ledger was put in its place; restore the newest one, or start "
                "another policy_id and add up the epsilons of both"
            )
    number = len(marked)
    while number and not place.holds(number):  # killed before it was marked
        number -= 1
    if number and place.read(number) != marked[number - 1].sha:
        raise LedgerError(
            f"ledger record {marked[number - 1].name} is not the one that {place.name} holds a "
            "mark of: it was rewritten; restore the ledger from its backup"
        )
    return number


def _marked(ledger: Ledger) -> list[Record]:
    return [record for record in ledger.chain.records if record.kind in MARKED_KINDS]
