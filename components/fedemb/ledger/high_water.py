"""How far a ledger came, written down outside of it: an older one put back in its place is refused.

A backup of a ledger is a true ledger, only older: its signatures and its chain hold, and what was
spent since is forgotten. So with the n-th record that charges a run or names trusted keys a mark of
that number is made in the key store, and, where `storage.witness` names a store, there too. A mark
is made once, never replaced, and holds the SHA-256 of the signed record. A ledger with fewer such
records than there are marks, or with another record at a mark, is refused before anything is
charged. The mark is made before the root key of the reservation: no run trains without it.

Not seen: ledger and key store put back together, unless a witness stands where whoever can do that
cannot write (a bucket with a locked retention policy); then not seen is what all three lost.
Records after the last mark bind, commit, void or release: without them a ledger charges as much, or
more.
"""

from __future__ import annotations

from contextlib import suppress

from fedemb.errors import LedgerError
from fedemb.keys import KeyStore
from fedemb.ledger.ledger import Ledger
from fedemb.ledger.records import Record
from fedemb.storage import Store, open_store

MARKED_KINDS = ("policy", "reserve", "keys")


def check_high_water(ledger: Ledger, keys: KeyStore, witness_uri: str | None = None) -> None:
    """Refuses a ledger that is older than its marks, or another one than theirs.

    Args:
      ledger: refreshed here if a mark is ahead of it, as another run may just have reserved.
      keys: key store of the ledger.
      witness_uri: store of the witness, if there is one.

    Raises:
      LedgerError: the ledger was put back to an older state, or rewritten.
      StorageError: a store cannot be read.
    """
    witness = open_store(witness_uri) if witness_uri is not None else None
    marked = _marked(ledger)
    while _place_of(ledger, keys, witness, len(marked) + 1):
        ledger.refresh()
        before, marked = len(marked), _marked(ledger)
        if len(marked) == before:
            place = _place_of(ledger, keys, witness, before + 1)
            raise LedgerError(
                f"the ledger of policy {ledger.policy_id!r} in {ledger.chain.store.uri} holds "
                f"{before} records that charge or name keys, and {place} says there were more: an "
                "older ledger was put in its place; restore the newest one, or start another "
                "policy_id and add up the epsilons of both"
            )
    if not marked:
        return
    last, number = marked[-1], len(marked)
    for place, sha in _shas(ledger, keys, witness, number).items():
        if sha != last.sha:
            raise LedgerError(
                f"ledger record {last.name} is not the one that {place} holds a mark of: it was "
                "rewritten; restore the ledger from its backup"
            )


def mark_high_water(ledger: Ledger, keys: KeyStore, witness_uri: str | None = None) -> None:
    """Makes the marks that are missing, the newest first; run again, it makes none.

    Raises:
      LedgerError: another ledger was marked meanwhile.
      StorageError: a store cannot be written.
    """
    witness = open_store(witness_uri) if witness_uri is not None else None
    marked = _marked(ledger)
    for number, record in zip(range(len(marked), 0, -1), reversed(marked), strict=True):
        name = _key_name(ledger, number)
        if keys.used(name):
            break
        with suppress(FileExistsError):  # another run of the policy marks at this moment
            keys.create(name, bytes.fromhex(record.sha))
    if witness is not None:
        for number, record in zip(range(len(marked), 0, -1), reversed(marked), strict=True):
            try:
                witness.create(_witness_name(ledger, number), record.sha.encode())
            except FileExistsError:
                break
    check_high_water(ledger, keys, witness_uri)


def _marked(ledger: Ledger) -> list[Record]:
    return [record for record in ledger.chain.records if record.kind in MARKED_KINDS]


def _place_of(ledger: Ledger, keys: KeyStore, witness: Store | None, number: int) -> str | None:
    """Who holds a mark of a number."""
    if keys.used(_key_name(ledger, number)):
        return f"the key store {keys.uri}"
    if witness is not None and witness.exists(_witness_name(ledger, number)):
        return f"the witness {witness.uri}"
    return None


def _shas(ledger: Ledger, keys: KeyStore, witness: Store | None, number: int) -> dict[str, str]:
    """What the marks of a number say, by place."""
    name, found = _key_name(ledger, number), dict[str, str]()
    if keys.used(name):
        found[f"the key store {keys.uri}"] = keys.fetch(name).hex()
    if witness is not None and witness.exists(_witness_name(ledger, number)):
        sha = witness.read(_witness_name(ledger, number)).decode(errors="replace")
        found[f"the witness {witness.uri}"] = sha
    return found


def _key_name(ledger: Ledger, number: int) -> str:
    return f"ledger/{ledger.policy_id}+{number}"


def _witness_name(ledger: Ledger, number: int) -> str:
    return f"{ledger.policy_id}/{number:08d}"
