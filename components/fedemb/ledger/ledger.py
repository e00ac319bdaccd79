"""The privacy ledger: reserve before the first private byte, never give back what was started.

    reserve -> bind -> rounds -> commit -> release
          `-> void (only while nothing was bound)

A reservation counts as fully spent until `commit` lowers it to the rounds that were started; a
crash, a timeout or a kill leaves it charged in full. Every act may be repeated: the same content
gives the same record again, another content is refused. Of many writers of one sequence number one
succeeds; the others read again and decide again. Specification: dp.md 3.2.
"""

from __future__ import annotations

from fedemb.config import PartitionConfig
from fedemb.documents.artifacts import canonical_json
from fedemb.errors import LedgerError, Refused
from fedemb.keys import KeyStore, open_key_store
from fedemb.keys.signatures import Signer, trust_of
from fedemb.keys.trust import ROLES, TRUST_SCHEMA, TrustStore
from fedemb.ledger.budget import Charge, Spent
from fedemb.ledger.chain import Anchor, Chain
from fedemb.ledger.reservation import Reservation, read_reservation, write_reservation
from fedemb.ledger.terms import PolicyTerms, Schedule, UserTerms, schedule_of, terms_of
from fedemb.ledger.writer import Ledger
from fedemb.storage import Store, open_store

__all__ = [
    "Anchor",
    "Charge",
    "Ledger",
    "PolicyTerms",
    "Reservation",
    "Schedule",
    "Spent",
    "UserTerms",
    "begin_policy",
    "blocks_of",
    "connect",
    "ensure_trust",
    "open_ledger",
    "policies",
    "read_reservation",
    "read_trust",
    "schedule_of",
    "terms_of",
    "write_reservation",
]

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
      LedgerError: the ledger is broken. An empty one is no error here, but `terms` is.
      SignatureInvalid: a record was changed, or signed by an unknown key.
    """
    ledger = Ledger(Chain(open_store(uri), policy_id, trust), signer)
    ledger.refresh()
    return ledger


def connect(ledger_uri: str, keys_uri: str, policy_id: str) -> Ledger:
    """Opens a ledger for writing, with the key of the key store and the trust file beside it.

    Raises:
      LedgerError: there is no trust file (no ledger was ever made there), or it is broken, or the
        key store is that of another ledger.
    """
    ledger = open_ledger(ledger_uri, policy_id, trust=read_trust(open_store(ledger_uri)))
    ledger.unlock(open_key_store(keys_uri))
    return ledger


def read_trust(store: Store) -> TrustStore:
    """Reads the trust file beside the ledgers.

    Raises:
      LedgerError: there is none.
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


def begin_policy(ledger: Ledger, terms: PolicyTerms, keys: KeyStore) -> None:
    """Writes record 0 with the owner's key; the same terms again change nothing.

    Raises:
      LedgerError: the key store is that of another ledger.
      Refused: the policy exists with other terms, or keys were rotated since the trust file was
        made: it trusts the old ones in a new policy, for ever.
    """
    trust = ledger.chain.trust
    if not ledger.chain.records:
        newest = {role: keys.newest(f"signing/{role}") for role in ROLES}
        old = [role for role in ROLES if newest[role] > trust.current(role).generation]
        if old:
            raise Refused(
                f"the signing keys {', '.join(old)} of {keys.uri} were rotated, and {TRUST_NAME} "
                f"of {ledger.chain.store.uri} would trust the retired ones in a new policy; "
                "give the new policy a ledger root of its own"
            )
    ledger.create_policy(terms, Signer.current(keys, "policy", trust))


def ensure_trust(store: Store, keys: KeyStore) -> TrustStore:
    """Reads the trust file beside the ledgers, made of one's own newest keys at first use."""
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


def blocks_of(partition: PartitionConfig) -> list[str]:
    """The user blocks a run asks for: `cohort/bucket`, from public constants alone."""
    return [
        f"{cohort}/{bucket}"
        for cohort in sorted(set(partition.cohorts))
        for bucket in range(partition.blocks_per_cohort)
    ]
