"""Rollback detection: high-water markers outside the ledger reveal a restored older ledger.

A backup of a ledger has valid signatures and a valid chain, but lacks the budget spent since. For
the n-th record that charges a run or adds trusted keys, a marker with the number n is therefore
created in the key store, and in the rollback anchor if `storage.rollback_anchor` is set. Records
that bind a training or count an evaluation have numbers of their own. A marker is never replaced
and holds the SHA-256 of the signed record. A ledger with fewer such records than markers, or with a
different record at the newest marker, is refused before any charge, refund, training or evaluation.
The marker is created before the root key of a reservation, the first round or the evaluation.

Limits: a rollback of ledger and key store together is not detected, unless the rollback anchor is
    in a store where the attacker cannot write (a bucket with a locked retention policy); a charge
    adds its missing markers. A rollback of all three stores is not detected. Records without
    a marker commit, void or release; without them the ledger charges the same amount or more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from fedemb.errors import ConfigError, LedgerError, Refused
from fedemb.foundation.addresses import nested
from fedemb.foundation.canonical_json import canonical_json
from fedemb.keys import KeyStore, policy_key_name
from fedemb.keys.trust import (
    ROLES,
    TRUST_SCHEMA,
    Signer,
    TrustedKey,
    TrustStore,
    public_key,
    trust_of,
)
from fedemb.ledger.ledger import Ledger
from fedemb.ledger.records import Chain, Record
from fedemb.ledger.terms import PolicyTerms, rollback_anchor_sha
from fedemb.storage import Store, open_store

MARKED_KINDS = {
    "": ("policy", "reserve", "keys", "approvers", "charge"),
    "run-": ("bind", "evaluation"),
}
"""Start of a marker's number -> the kinds of records that are numbered together."""


def check_high_water(
    ledger: Ledger, keys: KeyStore | None, rollback_anchor: str | None = None
) -> int:
    """Verifies that the ledger is not older than its markers and matches them.

    Args:
      ledger: the ledger; refreshed here if a marker is ahead, because another run may have
          reserved.
      keys: key store of the ledger; None checks only the rollback anchor.
      rollback_anchor: store of the rollback anchor, or None.

    Returns: The number of charges and keys that have a marker in some store.

    Raises:
      LedgerError: the ledger was restored to an older state, or rewritten.
      StorageError: a store cannot be read.
    """
    found = [(_check(ledger, at), at.series) for at in _places(ledger, keys, rollback_anchor)]
    return max((number for number, series in found if not series), default=0)


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
        marked = place.marked(ledger)
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
    series: str
    """Key of `MARKED_KINDS`."""
    holds: Callable[[int], bool]
    read: Callable[[int], str]
    create: Callable[[int, str], object]

    def marked(self, ledger: Ledger) -> list[Record]:
        """Returns the records that leave a marker here."""
        return [item for item in ledger.chain.records if item.kind in MARKED_KINDS[self.series]]


def _places(ledger: Ledger, keys: KeyStore | None, rollback_anchor: str | None) -> Iterator[_Place]:
    for series in MARKED_KINDS:
        yield from _places_of(series, ledger.policy_id, keys, rollback_anchor)


def _places_of(
    series: str, policy: str, keys: KeyStore | None, rollback_anchor: str | None
) -> Iterator[_Place]:
    if keys is not None:
        start = f"ledger/{policy}+{series}"
        yield _Place(
            f"the key store {keys.uri}",
            series,
            holds=lambda number: keys.used(f"{start}{number}"),
            read=lambda number: keys.fetch(f"{start}{number}").hex(),
            create=lambda number, sha: keys.create(f"{start}{number}", bytes.fromhex(sha)),
        )
    if rollback_anchor is not None:
        store, there = open_store(rollback_anchor), f"{policy}/{series}"
        yield _Place(
            f"the rollback anchor {store.uri}",
            series,
            holds=lambda number: store.exists(f"{there}{number:08d}"),
            read=lambda number: store.read(f"{there}{number:08d}").decode(errors="replace"),
            create=lambda number, sha: store.create(f"{there}{number:08d}", sha.encode()),
        )


def _check(ledger: Ledger, place: _Place) -> int:
    """Compares the ledger with the markers of one store; returns the newest number, 0 if none."""
    marked = place.marked(ledger)
    while place.holds(len(marked) + 1):
        ledger.refresh()
        before, marked = len(marked), place.marked(ledger)
        if len(marked) == before:
            raise LedgerError(
                f"the ledger of policy {ledger.policy_id!r} in {ledger.chain.store.uri} is older "
                f"than its markers: it has {before} records of kind "
                f"{', '.join(MARKED_KINDS[place.series])}, and {place.name} has more markers. "
                "Restore the newest ledger, or start a new "
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


TRUST_NAME = "trust.json"


def open_ledger(
    uri: str, policy_id: str, *, signer: Signer | None = None, trust: TrustStore
) -> Ledger:
    """Opens and verifies the ledger of a policy.

    Args:
      uri: root of the ledgers: a folder, gs:// or s3://.
      policy_id: id of the policy.
      signer: key of the role `ledger`; None opens the ledger read-only.
      trust: trusted keys.

    Raises:
      LedgerError: the ledger is broken, or was created with other trusted keys. An empty ledger
          does not raise here; `terms` raises.
      SignatureInvalid: a record was changed, or signed by an unknown key.
    """
    ledger = Ledger(Chain(open_store(uri), policy_id, trust), signer)
    ledger.refresh()
    return ledger


def read_trust(store: Store) -> TrustStore:
    """Reads the trust file beside the ledgers.

    Raises:
      LedgerError: it does not exist.
    """
    try:
        data = store.read(TRUST_NAME)
    except FileNotFoundError as error:
        raise LedgerError(
            f"{store.uri} holds no {TRUST_NAME}, so no ledger was made there; name the right store "
            "or make one with `fedemb ledger init`"
        ) from error
    return TrustStore.parse(data, TRUST_NAME)


def policies(store: Store) -> list[str]:
    """Returns the ids of the policies that have a ledger in a store."""
    first = "/00000000.json"
    if store.local_root is not None:  # avoids listing every record of every ledger
        return sorted(path.parent.name for path in store.local_root.glob(f"*{first}"))
    return sorted(
        name.removesuffix(first)
        for name in store.list()
        if name.endswith(first) and name.count("/") == 1
    )


def init_policy(
    ledger: Ledger, terms: PolicyTerms, keys: KeyStore, rollback_anchor: str | None = None
) -> None:
    """Writes record 0 with the owner's key. Idempotent for the same terms.

    Raises:
      LedgerError: the key store belongs to another ledger, or a marker proves that the policy was
          created before.
      Refused: the policy exists with other terms, or keys were rotated after the trust file was
        created: a new policy would trust the retired keys permanently.
    """
    trust = ledger.chain.trust
    check_high_water(ledger, keys, rollback_anchor)
    if not ledger.chain.records:
        newest = {role: keys.newest(f"signing/{role}") for role in ROLES}
        old = [role for role in ROLES if newest[role] > trust.current(role).generation]
        if old:
            raise Refused(
                f"the signing keys {', '.join(old)} of {keys.uri} were rotated, but {TRUST_NAME} "
                f"of {ledger.chain.store.uri} trusts the retired ones; use a new ledger root for "
                "the new policy"
            )
    terms = replace(terms, trust_sha=trust.digest)
    ledger.create_policy(terms, Signer.current(keys, "policy", trust))
    mark_high_water(ledger, keys, rollback_anchor)


def ensure_policy_key(ledger: Ledger, keys: KeyStore) -> None:
    """Creates the key of a policy without charges; a lost key cannot be replaced.

    Raises:
      LedgerError: runs were charged and the key is missing. A new key would assign other user ids,
          blocks and held-out users, and hide the privacy loss already recorded.
    """
    name = policy_key_name(ledger.policy_id)
    if keys.exists(name):
        return
    if ledger.state.attempts:
        raise LedgerError(
            f"the key of policy {ledger.policy_id!r} is not in {keys.uri}, although its ledger has "
            "runs. A new key would assign users to other blocks. Restore the key store, or start "
            "a new policy_id and add up the epsilons of both policies"
        )
    keys.load_or_create(name)


def ensure_trust(store: Store, keys: KeyStore) -> TrustStore:
    """Returns the trust file of the root; creates it with the newest keys at first use.

    Raises:
      ConfigError: keys and ledger lie one inside the other.
    """
    if nested(store.uri, keys.uri):
        raise ConfigError(
            f"The keys {keys.uri} and the ledger {store.uri} lie one inside the other, and who "
            "writes to the ledger must not read its keys. Name another folder for the keys."
        )
    if not store.exists(TRUST_NAME):
        document = {"schema": TRUST_SCHEMA, **trust_of(keys).to_json()}
        with suppress(FileExistsError):  # another process creates it at the same time
            store.create(TRUST_NAME, canonical_json(document))
    return TrustStore.parse(store.read(TRUST_NAME), TRUST_NAME)


def rotate_keys(
    ledger_uri: str,
    keys: KeyStore,
    reason: str,
    roles: Iterable[str] = ROLES,
    *,
    rollback_anchors: Sequence[str] = (),
) -> list[Record]:
    """Adds new signing keys to every policy of the root and retires the previous keys.

    Each policy gets a `keys` record, signed by its owner with the key trusted so far (see `trust`).
    After an interrupted rotation, run it again: policies that were already rotated get a further
    generation, the others get the same generation directly.

    Args:
      ledger_uri: URI of the root of the ledgers.
      keys: key store of the root with the owner's key; the new keys are created there.
      reason: reason for the rotation, kept in the ledgers permanently.
      roles: roles whose keys are rotated.
      rollback_anchors: stores of the policies' rollback anchors.

    Returns:
      The records written, one per policy.

    Raises:
      LedgerError: the root has no ledger, a ledger is older than its markers, or the key store
          belongs to another root.
      Refused: a policy's rollback anchor is not among `rollback_anchors`; nothing is written.
    """
    store = open_store(ledger_uri)
    trust = read_trust(store)
    ledgers = [open_ledger(ledger_uri, name, trust=trust) for name in policies(store)]
    if not ledgers:
        raise LedgerError(f"no ledger in {store.uri}; create one by `fedemb ledger init`")
    for ledger in ledgers:  # check every owner's key before any key is created
        Signer.current(keys, "policy", ledger.chain.trust)
        check_high_water(ledger, keys, find_rollback_anchor(ledger, rollback_anchors))
    newest = {
        role: max((_current(ledger, role) for ledger in ledgers), key=lambda key: key.generation)
        for role in ROLES
    }
    for role in roles:
        newest[role] = public_key(keys, role, keys.renew(f"signing/{role}"))
    return [
        _rotate(
            ledger, newest.values(), reason, keys, find_rollback_anchor(ledger, rollback_anchors)
        )
        for ledger in ledgers
    ]


def _rotate(
    ledger: Ledger,
    newest: Iterable[TrustedKey],
    reason: str,
    keys: KeyStore,
    rollback_anchor: str | None,
) -> Record:
    fresh = [key for key in newest if key.generation > _current(ledger, key.role).generation]
    return as_owner(ledger, keys, rollback_anchor, partial(ledger.rotate, fresh, reason))


def as_owner(
    ledger: Ledger, keys: KeyStore, rollback_anchor: str | None, act: Callable[[Signer], Record]
) -> Record:
    """Writes a record of the policy owner; head and marker keep it from being removed later.

    Args:
      ledger: ledger of the policy, not older than its markers.
      keys: key store of the ledger, with the owner's key.
      rollback_anchor: store of the rollback anchor, if the configuration names one.
      act: writes the record with the owner's key.
    """
    record = act(Signer.current(keys, "policy", ledger.chain.trust))
    ledger.chain.write_head(record, Signer.current(keys, "ledger", ledger.chain.trust))
    mark_high_water(ledger, keys, rollback_anchor)
    return record


def name_approvers(
    ledger: Ledger,
    approvers: Mapping[str, str],
    reason: str,
    keys: KeyStore,
    rollback_anchor: str | None = None,
) -> Record:
    """Sets the complete list of people who may approve releases of a policy.

    Args:
      ledger: ledger of the policy, not older than its markers.
      approvers: name -> public key, raw Ed25519 in hexadecimal digits.
      reason: reason for the change, kept in the ledger permanently.
      keys: key store of the ledger, with the owner's key.
      rollback_anchor: store of the rollback anchor, if the configuration names one.

    Raises:
      LedgerError: a key is listed twice or was removed before.
    """
    act = partial(ledger.name_approvers, approvers, reason)
    return as_owner(ledger, keys, rollback_anchor, act)


def _current(ledger: Ledger, role: str) -> TrustedKey:
    return ledger.chain.trust.current(role)


def refuse_emptied(ledger: Ledger, keys: KeyStore) -> None:
    """Rejects an empty ledger of a used policy, because its recorded privacy loss would be lost.

    Raises:
      LedgerError: the policy's key exists, but its records do not.
    """
    if not ledger.chain.records and keys.exists(policy_key_name(ledger.policy_id)):
        ledger.refresh()  # another process may have created it meanwhile
        if not ledger.chain.records:
            raise LedgerError(
                f"{ledger.chain.store.uri} holds no ledger of policy {ledger.policy_id!r}, but "
                "its key exists, so there was one: name the right store, restore it from its "
                "backup, or start another policy_id"
            )
