"""Signing: Ed25519 over canonical JSON. The module `trust` defines which keys are trusted.

A signature covers the role of its key, so a key trusted for the ledger cannot sign a report.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedemb.errors import LedgerError
from fedemb.foundation.canonical_json import ToJson
from fedemb.foundation.document import D, Written, write
from fedemb.keys.base import KeyStore, generation_name
from fedemb.keys.derived import derive
from fedemb.keys.trust import ALGORITHM, APPROVER, ROLES, TrustedKey, TrustStore, key_id_of, message


class Signer:
    """A private key in one role."""

    def __init__(self, role: str, seed: bytes, generation: int = 1):
        """Creates the signer of a role from its 32-byte secret.

        Raises:
          ValueError: unknown role.
        """
        if role not in ROLES:
            raise ValueError(f"unknown role {role!r}; use one of {', '.join(ROLES)}")
        private = Ed25519PrivateKey.from_private_bytes(derive(seed, "ed25519", role))
        self._take(role, private, generation)

    @classmethod
    def of_approver(cls, private: Ed25519PrivateKey) -> Signer:
        """Returns the signer of an approver, who keeps the key."""
        signer = cls.__new__(cls)
        signer._take(APPROVER, private, 1)
        return signer

    def _take(self, role: str, private: Ed25519PrivateKey, generation: int) -> None:
        self.role = role
        self.generation = generation
        self._private = private
        self.public_key = self._private.public_key().public_bytes_raw().hex()
        self.key_id = key_id_of(self.public_key)

    @classmethod
    def load_or_create(cls, store: KeyStore, role: str, generation: int = 1) -> Signer:
        """Returns the signer with the role's key `signing/<role>`, created at first use."""
        name = generation_name(f"signing/{role}", generation)
        return cls(role, store.load_or_create(name), generation)

    @classmethod
    def newest(cls, store: KeyStore, role: str) -> Signer:
        """Returns the signer with the newest key of a role, for a step without a ledger.

        Readers of the signed document, which have access to the ledger, check whether the key is
        trusted.
        """
        generation = 1
        while store.exists(generation_name(f"signing/{role}", generation + 1)):
            generation += 1
        return cls.load_or_create(store, role, generation)

    @classmethod
    def current(cls, store: KeyStore, role: str, trust: TrustStore) -> Signer:
        """Returns the signer with the key that is currently trusted in the role.

        Raises:
          LedgerError: the store has no key of that generation, or another key.
        """
        key = trust.current(role)
        secret = store.fetch(generation_name(f"signing/{role}", key.generation))
        signer = cls(role, secret, key.generation)
        if signer.trusted() != key:
            raise LedgerError(
                f"key signing/{role} in {store.uri} is not the one this ledger trusts; name the "
                "key store the ledger was made with"
            )
        return signer

    def sign(self, body: Mapping[str, ToJson]) -> dict[str, str]:
        """Returns the signature object of a body without `signature`."""
        value = self._private.sign(message(self.role, body)).hex()
        return {"key_id": self.key_id, "algorithm": ALGORITHM, "value": value}

    def trusted(self) -> TrustedKey:
        """Returns the public key, to be pinned."""
        return TrustedKey(self.key_id, self.role, self.public_key, self.generation)


def public_key(store: KeyStore, role: str, generation: int) -> TrustedKey:
    """Returns the public key of the store's key for a role, created at first use."""
    return Signer.load_or_create(store, role, generation).trusted()


def sign_document(document: Mapping[str, ToJson], signer: Signer) -> dict[str, ToJson]:
    """Returns the document with `signature: {key_id, algorithm, value}` added or replaced."""
    body = {key: value for key, value in document.items() if key != "signature"}
    return {**body, "signature": signer.sign(body)}


def trust_of(store: KeyStore) -> TrustStore:
    """Returns the trust store of the newest keys of all roles, created at first use."""
    return TrustStore(
        public_key(store, role, max(1, store.newest(f"signing/{role}"))) for role in ROLES
    )


def write_signed(path: Path, document: D, signer: Signer) -> Written[D]:
    """Signs and writes a document, and returns it as written.

    Raises:
      ValueError: the signer has another role than the document.
    """
    if signer.role != document.role:
        raise ValueError(
            f"a {document.kind} document needs a key of the role {document.role!r}, got a key of "
            f"{signer.role!r}; use the signer of the document's role"
        )
    return write(path, document, signer.sign(document.content()))
