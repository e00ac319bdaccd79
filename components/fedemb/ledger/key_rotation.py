"""Rotates the signing keys of all policies of a ledger root.

Each policy gets a `keys` record that its owner signs with the key trusted so far (see `trust`). A
rotation that was cut short may be run again: policies it reached get a further generation, those it
did not reach go there at once.
"""

from __future__ import annotations

from collections.abc import Iterable

from fedemb.errors import LedgerError
from fedemb.keys import KeyStore
from fedemb.keys.signatures import Signer, public_key
from fedemb.keys.trust import ROLES, TrustedKey
from fedemb.ledger.ledger import Ledger, open_ledger, policies, read_trust
from fedemb.ledger.records import Record
from fedemb.storage import open_store


def rotate_keys(
    ledger_uri: str, keys: KeyStore, reason: str, roles: Iterable[str] = ROLES
) -> list[Record]:
    """Names new signing keys in every policy of the root and retires those before.

    Args:
      ledger_uri: root of the ledgers.
      keys: their key store, with the owner's key in it; the new keys are made there.
      reason: why; stays in the ledgers for ever.
      roles: whose keys.

    Returns:
      The records written, one of each policy.

    Raises:
      LedgerError: there is no ledger, or the key store is that of another one.
    """
    store = open_store(ledger_uri)
    trust = read_trust(store)
    ledgers = [open_ledger(ledger_uri, name, trust=trust) for name in policies(store)]
    if not ledgers:
        raise LedgerError(f"{store.uri} holds no ledger; `fedemb ledger init` makes one")
    for ledger in ledgers:  # before any key is made: the owner's key of each is at hand
        Signer.current(keys, "policy", ledger.chain.trust)
    newest = {
        role: max((_current(ledger, role) for ledger in ledgers), key=lambda key: key.generation)
        for role in ROLES
    }
    for role in roles:
        newest[role] = public_key(keys, role, keys.renew(f"signing/{role}"))
    return [_rotate(ledger, newest.values(), reason, keys) for ledger in ledgers]


def _rotate(ledger: Ledger, newest: Iterable[TrustedKey], reason: str, keys: KeyStore) -> Record:
    fresh = [key for key in newest if key.generation > _current(ledger, key.role).generation]
    record = ledger.rotate(fresh, reason, Signer.current(keys, "policy", ledger.chain.trust))
    # So that the record cannot be cut off again before the next step writes its own head.
    ledger.chain.write_head(record, Signer.current(keys, "ledger", ledger.chain.trust))
    return record


def _current(ledger: Ledger, role: str) -> TrustedKey:
    return ledger.chain.trust.current(role)
