"""What is derived from a secret key: subkeys of one purpose each, and commitments."""

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
    """Name of the key that is fixed for a policy's life.

    Another one gives the same people other ids, blocks and evaluation sets, and what was spent on
    them is lost from sight: it is created before the first reservation and never again, see
    `ledger.ensure_policy_key`.
    """
    return f"policy/{policy_id}"


def partition_key(store: KeyStore, policy_id: str) -> bytes:
    """Key of user id hashing.

    Raises:
      LedgerError: the policy has no key.
    """
    return derive(store.fetch(policy_key_name(policy_id)), "partition")


def commitment_key(store: KeyStore, policy_id: str) -> bytes:
    """Key of commitments to private data; raises as `partition_key`."""
    return derive(store.fetch(policy_key_name(policy_id)), "commitment")


def commit_to_people(key: bytes, run_id: str, attempt: int, digest: str) -> str:
    """Commitment to the users of one attempt of a run.

    Equal commitments of two attempts would tell that nobody trained who was forgotten between.

    Args:
      key: of commitments, see `commitment_key`.
      run_id: name of the run.
      attempt: its number.
      digest: of the folder the users lie in.
    """
    return derive(key, "people/1", run_id, str(attempt), digest).hex()


def commit_to(key: bytes, data: bytes) -> str:
    """Keyed commitment to private data, 64 hexadecimal digits.

    A plain digest would tell the adversary of the definition which of two data sets it was.
    """
    return derive(key, "commitment/1", data).hex()
