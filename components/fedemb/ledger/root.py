"""A root of ledgers: one folder per policy, and the trust file that all of them begin with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from fedemb.errors import LedgerError, Refused
from fedemb.foundation.canonical_json import canonical_json
from fedemb.keys import KeyStore, policy_key_name
from fedemb.keys.signatures import Signer, public_key, trust_of
from fedemb.keys.trust import ROLES, TRUST_SCHEMA, TrustedKey, TrustStore
from fedemb.ledger.chain import Chain
from fedemb.ledger.high_water import check_high_water, find_witness, mark_high_water
from fedemb.ledger.ledger import Ledger
from fedemb.ledger.records import Record
from fedemb.ledger.terms import PolicyTerms
from fedemb.storage import Store, open_store

TRUST_NAME = "trust.json"


def open_ledger(
    uri: str, policy_id: str, *, signer: Signer | None = None, trust: TrustStore
) -> Ledger:
    """Opens and verifies the ledger of a policy.

    Args:
      uri: root of the ledgers: a folder, gs:// or s3://.
      policy_id: whose ledger.
      signer: key of the role `ledger`; None opens for reading.
      trust: keys trusted.

    Raises:
      LedgerError: the ledger is broken, or was begun under other trusted keys. An empty one is no
        error here, but `terms` is.
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
    """The policies whose ledgers lie in a store."""
    first = "/00000000.json"
    if store.local_root is not None:  # without a look at each of ten thousand records
        return sorted(path.parent.name for path in store.local_root.glob(f"*{first}"))
    return sorted(
        name.removesuffix(first)
        for name in store.list()
        if name.endswith(first) and name.count("/") == 1
    )


def begin_policy(
    ledger: Ledger, terms: PolicyTerms, keys: KeyStore, witness_uri: str | None = None
) -> None:
    """Writes record 0 with the owner's key; the same terms again change nothing.

    Raises:
      LedgerError: the key store is that of another ledger, or a mark says that the policy was begun
        before.
      Refused: the policy exists with other terms, or keys were rotated since the trust file was
        made: it trusts the old ones in a new policy, for ever.
    """
    trust = ledger.chain.trust
    check_high_water(ledger, keys, witness_uri)
    if not ledger.chain.records:
        newest = {role: keys.newest(f"signing/{role}") for role in ROLES}
        old = [role for role in ROLES if newest[role] > trust.current(role).generation]
        if old:
            raise Refused(
                f"the signing keys {', '.join(old)} of {keys.uri} were rotated, and {TRUST_NAME} "
                f"of {ledger.chain.store.uri} would trust the retired ones in a new policy; "
                "give the new policy a ledger root of its own"
            )
    terms = replace(terms, trust_sha=trust.digest)
    ledger.create_policy(terms, Signer.current(keys, "policy", trust))
    mark_high_water(ledger, keys, witness_uri)


def ensure_policy_key(ledger: Ledger, keys: KeyStore) -> None:
    """Makes the key of a policy under which nobody was charged yet; a lost one has no substitute.

    Raises:
      LedgerError: runs were charged and the key is gone: with another one people would get other
        ids, blocks and evaluation sets, and what was spent on them would be lost from sight.
    """
    name = policy_key_name(ledger.policy_id)
    if keys.exists(name):
        return
    if ledger.state.attempts:
        raise LedgerError(
            f"the key of policy {ledger.policy_id!r} is not in {keys.uri}, and its ledger holds "
            "runs: with another key its users would get other ids, and what they spent would be "
            "lost from sight; restore the key store, or start another policy_id and add up the "
            "epsilons of both"
        )
    keys.load_or_create(name)


def ensure_trust(store: Store, keys: KeyStore) -> TrustStore:
    """Reads the trust file beside the ledgers, made of this store's newest keys at first use."""
    try:
        return TrustStore.parse(store.read(TRUST_NAME), TRUST_NAME)
    except FileNotFoundError:
        pass
    trust = trust_of(keys)
    document = {"schema": TRUST_SCHEMA, **trust.to_json()}
    try:
        store.create(TRUST_NAME, canonical_json(document))
    except FileExistsError:
        return TrustStore.parse(store.read(TRUST_NAME), TRUST_NAME)
    return trust


def rotate_keys(
    ledger_uri: str,
    keys: KeyStore,
    reason: str,
    roles: Iterable[str] = ROLES,
    *,
    witnesses: Sequence[str] = (),
) -> list[Record]:
    """Names new signing keys in every policy of the root and retires those before.

    Each policy gets a `keys` record that its owner signs with the key trusted so far (see `trust`).
    A rotation that was cut short may be run again: policies it reached get a further generation,
    those it did not reach go there at once.

    Args:
      ledger_uri: root of the ledgers.
      keys: their key store, with the owner's key in it; the new keys are made there.
      reason: why; stays in the ledgers for ever.
      roles: whose keys.
      witnesses: stores of the witnesses that its policies have.

    Returns:
      The records written, one of each policy.

    Raises:
      LedgerError: there is no ledger, it is older than its marks, or the key store is that of
        another one.
      Refused: a policy has a witness that is not among those named; nothing is written.
    """
    store = open_store(ledger_uri)
    trust = read_trust(store)
    ledgers = [open_ledger(ledger_uri, name, trust=trust) for name in policies(store)]
    if not ledgers:
        raise LedgerError(f"{store.uri} holds no ledger; `fedemb ledger init` makes one")
    for ledger in ledgers:  # before any key is made: the owner's key of each is there
        Signer.current(keys, "policy", ledger.chain.trust)
        check_high_water(ledger, keys, find_witness(ledger, witnesses))
    newest = {
        role: max((_current(ledger, role) for ledger in ledgers), key=lambda key: key.generation)
        for role in ROLES
    }
    for role in roles:
        newest[role] = public_key(keys, role, keys.renew(f"signing/{role}"))
    return [
        _rotate(ledger, newest.values(), reason, keys, find_witness(ledger, witnesses))
        for ledger in ledgers
    ]


def _rotate(
    ledger: Ledger,
    newest: Iterable[TrustedKey],
    reason: str,
    keys: KeyStore,
    witness_uri: str | None,
) -> Record:
    fresh = [key for key in newest if key.generation > _current(ledger, key.role).generation]
    record = ledger.rotate(fresh, reason, Signer.current(keys, "policy", ledger.chain.trust))
    _keep(ledger, record, keys, witness_uri)
    return record


def _keep(ledger: Ledger, record: Record, keys: KeyStore, witness_uri: str | None) -> None:
    """Sees to it that a record cannot be cut off again before the next step writes its own head."""
    ledger.chain.write_head(record, Signer.current(keys, "ledger", ledger.chain.trust))
    mark_high_water(ledger, keys, witness_uri)


def name_approvers(
    ledger: Ledger,
    approvers: Mapping[str, str],
    reason: str,
    keys: KeyStore,
    witness_uri: str | None = None,
) -> Record:
    """Names all who may approve releases of a policy, in the place of those before.

    Args:
      ledger: of the policy, not older than its marks.
      approvers: name -> public key, raw Ed25519 in hexadecimal digits.
      reason: why; stays in the ledger for ever.
      keys: key store of the ledger, with the owner's key in it.
      witness_uri: store of the witness, if the configuration names one.

    Raises:
      LedgerError: a key stands there twice or was taken away before.
    """
    trust = ledger.chain.trust
    record = ledger.name_approvers(approvers, reason, Signer.current(keys, "policy", trust))
    _keep(ledger, record, keys, witness_uri)
    return record


def _current(ledger: Ledger, role: str) -> TrustedKey:
    return ledger.chain.trust.current(role)
