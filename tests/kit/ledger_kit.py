"""A ledger with a policy, and reservations without a pipeline around them."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent

from fedemb.foundation.canonical_json import sha256_hex
from fedemb.keys import KeyStore, open_key_store, policy_key_name
from fedemb.keys.trust import Signer
from fedemb.ledger import Ledger, PolicyTerms, UserTerms, ensure_trust, open_ledger, read_trust
from fedemb.ledger.records import RecordContent, encode_record
from fedemb.privacy.guarantee import event_to_json
from fedemb.storage import open_store

DELTA = 1e-5


def sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def users(cohort=None, buckets=1) -> UserTerms:
    return UserTerms(
        user_id_column="user_id",
        cohort_column=cohort,
        blocks_per_cohort=buckets,
        shared_label_column=None,
        evaluation={"by": "hash", "fraction": 0.1},
    )


def terms(**changes) -> PolicyTerms:
    base = {
        "epsilon_cap": 4.0,
        "delta": DELTA,
        "users_lower_bound": 20_000,
        "composition": "renyi",
        "renyi_order": 8.0,
        "users": users(),
    }
    return PolicyTerms(**{**base, **changes})


def event(noise: float = 2.0, rounds: int = 20, q: float = 0.05):
    return SelfComposedDpEvent(PoissonSampledDpEvent(q, GaussianDpEvent(noise)), rounds)


def content(noise=2.0, rounds=20, blocks=("all/0",), purpose="release", **changes) -> dict:
    base = {
        "purpose": purpose,
        "blocks_requested": list(blocks),
        "event": event_to_json(event(noise, rounds)),
        "relation": "REPLACE_ONE",
        "delta": DELTA,
        "rounds": rounds,
        "plan_sha": sha(f"plan {noise} {rounds}"),
        "config_sha": sha("config"),
        "code_sha": sha("code"),
        "input": "s3://images/2026-01-05",
    }
    return {**base, **changes}


@dataclass
class Kit:
    """Where a ledger and its keys lie."""

    ledger_uri: str
    keys_uri: str
    policy_id: str = "weekly"

    @property
    def keys(self) -> KeyStore:
        return open_key_store(self.keys_uri)

    @property
    def trust(self):
        return ensure_trust(open_store(self.ledger_uri), self.keys)

    @property
    def trainer(self) -> Signer:
        return Signer.load_or_create(self.keys, "trainer")

    @property
    def owner(self) -> Signer:
        return Signer.load_or_create(self.keys, "policy")

    def open(self) -> Ledger:
        ledger = self.reader()
        ledger.unlock(self.keys)
        return ledger

    def reader(self) -> Ledger:
        return open_ledger(self.ledger_uri, self.policy_id, trust=self.trust)

    def path(self, sequence: int) -> Path:
        return Path(self.ledger_uri, self.policy_id, f"{sequence:08d}.json")


def make(root: Path, ledger_uri: str | None = None, **changes) -> Kit:
    """A ledger whose policy is written."""
    kit = Kit(ledger_uri or str(root / "ledger"), str(root / "keys"))
    kit.open().create_policy(terms(**changes), kit.owner)
    return kit


def bind(ledger: Ledger, reservation, text: str = "inputs", root: str = "root"):
    return ledger.bind(
        reservation,
        inputs_sha=sha(text),
        commitments={"users": sha("users")},
        private_root=sha(root),
    )


def commit(kit: Kit, ledger: Ledger, reservation, rounds: int):
    return ledger.commit(
        reservation,
        rounds_started=rounds,
        round_log_sha=sha(f"log {rounds}"),
        card_sha=sha("card"),
        signer=kit.trainer,
        keys=kit.keys,
    )


def forge(ledger_uri: str, signer: Signer, kind: str, body: Mapping, **fields) -> None:
    """Adds a well-linked record around `Ledger`, as anyone who may write to the store could."""
    folder = Path(ledger_uri, "weekly")
    records = sorted(folder.glob("[0-9]*.json"))
    content = {
        "policy_id": "weekly",
        "sequence": len(records),
        "previous": sha256_hex(records[-1].read_bytes()),
        "kind": kind,
        "run_id": "monday",
        "attempt": 1,
        "time": "2026-01-05T00:00:00+00:00",
        "actor": "a thief",
        "body": body,
    }
    data = encode_record(RecordContent(**{**content, **fields}), signer)
    (folder / f"{len(records):08d}.json").write_bytes(data)


def with_policy_key(keys: KeyStore, *policies: str) -> KeyStore:
    """The key store once the first run of each policy was reserved."""
    for policy_id in policies or ("weekly",):
        keys.load_or_create(policy_key_name(policy_id))
    return keys


def connect(ledger_uri: str, keys_uri: str, policy_id: str) -> Ledger:
    """Opens a ledger for writing, with the key of the key store and the trust file beside it.

    Raises:
      LedgerError: the trust file is missing (no ledger was created there) or broken, or the
        key store is that of another ledger.
    """
    ledger = open_ledger(ledger_uri, policy_id, trust=read_trust(open_store(ledger_uri)))
    ledger.unlock(open_key_store(keys_uri))
    return ledger
