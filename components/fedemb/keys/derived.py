"""Values derived from a secret key: subkeys of one purpose each, and commitments."""

from __future__ import annotations

import hmac

from fedemb.keys.base import KeyStore


def derive(key: bytes, *labels: str | bytes) -> bytes:
    """Derives a 32-byte subkey by HMAC-SHA256 over the labels, each prefixed with its length.

    >>> derive(b"k", "ab", "c") == derive(b"k", "a", "bc")
    False
    """
    message = bytearray(len(labels).to_bytes(8, "big"))
    for label in labels:
        data = label.encode() if isinstance(label, str) else label
        message += len(data).to_bytes(8, "big") + data
    return hmac.digest(key, bytes(message), "sha256")


def policy_key_name(policy_id: str) -> str:
    """Returns the name of the key that is fixed for the life of a policy.

    With another key, the same users would get other IDs, blocks and evaluation sets, and their
    spent budget would no longer be attributed to them. So the key is created only once, before the
    first reservation; see `ledger.ensure_policy_key`.
    """
    return f"policy/{policy_id}"


def partition_key(store: KeyStore, policy_id: str) -> bytes:
    """Returns the key that hashes user IDs.

    Raises:
      LedgerError: the policy has no key.
    """
    return derive(store.fetch(policy_key_name(policy_id)), "partition")


def commitment_key(store: KeyStore, policy_id: str) -> bytes:
    """Returns the key of commitments to private data; raises as `partition_key`."""
    return derive(store.fetch(policy_key_name(policy_id)), "commitment")


def commit_to_people(key: bytes, run_id: str, attempt: int, digest: str) -> str:
    """Returns the keyed commitment to the users of one attempt, by the digest of their folder.

    Run and attempt are part of the commitment. Otherwise equal commitments of two attempts would
    reveal that no user deleted between them was among the training users.
    """
    return derive(key, "people/1", run_id, str(attempt), digest).hex()


def commit_to(key: bytes, data: bytes) -> str:
    """Returns a keyed commitment to private data, 64 hexadecimal digits.

    A plain digest would let the adversary of the privacy definition distinguish two data sets.
    """
    return derive(key, "commitment/1", data).hex()
