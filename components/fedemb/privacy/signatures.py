"""Who says so: Ed25519 signatures over canonical JSON, and the pinned keys one believes.

A signature covers the role it was made in, so a key trusted for the ledger cannot sign a report.
A key that travels with a document proves nothing: verification takes a `TrustStore` from elsewhere.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ec import (
    SECP256R1,
    EllipticCurvePrivateKey,
    EllipticCurvePublicKey,
    derive_private_key,
)
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from components.fedemb.artifacts import canonical_json, parse_json, write_json
from components.fedemb.errors import ArtifactError, SignatureInvalid
from components.fedemb.privacy.keys import KeyStore, derive

ROLES = ("policy", "ledger", "trainer", "report", "gate", "release", "bundle")
"""Policies and waivers, records, round logs, reports, verdicts, attestations, signed bundles."""
TRUST_SCHEMA = "fedemb/trust/1"
_ALGORITHM = "ed25519"
_P256_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551


def _message(role: str, body: Mapping[str, Any]) -> bytes:
    return b"fedemb/signature/1\0" + role.encode() + b"\0" + canonical_json(dict(body))


def _key_id(public_key: str) -> str:
    return hashlib.sha256(bytes.fromhex(public_key)).hexdigest()[:32]


@dataclass(frozen=True)
class TrustedKey:
    """A public key in hexadecimal digits and the one role it is believed in.

    Raw Ed25519; for the role `bundle` a compressed point of P-256, which model_signing works with.
    """

    key_id: str
    role: str
    public_key: str


class Signer:
    """A private key in one role."""

    def __init__(self, role: str, seed: bytes):
        """Makes the signer of a role from its 32-byte secret.

        Raises:
          ValueError: unknown role.
        """
        if role not in ROLES:
            raise ValueError(f"role={role!r} is not one of {', '.join(ROLES)}")
        self.role = role
        self._private = Ed25519PrivateKey.from_private_bytes(derive(seed, "ed25519", role))
        self.public_key = self._private.public_key().public_bytes_raw().hex()
        self.key_id = _key_id(self.public_key)

    @classmethod
    def load_or_create(cls, store: KeyStore, role: str) -> Signer:
        """Takes the role's key `signing/<role>` from the store, created at first use."""
        return cls(role, store.load_or_create(f"signing/{role}"))

    def sign(self, body: Mapping[str, Any]) -> dict[str, str]:
        """Returns the signature object of a body without `signature`."""
        value = self._private.sign(_message(self.role, body)).hex()
        return {"key_id": self.key_id, "algorithm": _ALGORITHM, "value": value}

    def sign_bytes(self, data: bytes) -> bytes:
        """Signs bytes as they are, for envelopes with an encoding of their own (DSSE)."""
        return self._private.sign(data)

    def trusted(self) -> TrustedKey:
        """The public half, to be pinned."""
        return TrustedKey(self.key_id, self.role, self.public_key)


class TrustStore:
    """The public keys one believes, each in one role."""

    def __init__(self, keys: Iterable[TrustedKey]):
        """Indexes the keys.

        Raises:
          SignatureInvalid: a role is unknown, or a key id is not that of its key.
        """
        self.keys = tuple(sorted(keys, key=lambda key: (key.role, key.key_id)))
        for key in self.keys:
            if key.role not in ROLES or key.key_id != _key_id(key.public_key):
                raise SignatureInvalid(
                    f"trust store entry {key.key_id!r} has an unknown role or does not fit its "
                    "key; take the trust store from its owner again"
                )
        self._public = {
            (key.role, key.key_id): Ed25519PublicKey.from_public_bytes(
                bytes.fromhex(key.public_key)
            )
            for key in self.keys
            if key.role != "bundle"
        }

    @classmethod
    def parse(cls, data: bytes, name: str = "trust.json") -> TrustStore:
        """Reads a trust file's bytes.

        Raises:
          ArtifactError: not a trust file of this version.
          SignatureInvalid: an entry contradicts itself.
        """
        document = parse_json(data, TRUST_SCHEMA, name)
        try:
            if set(document) != {"schema", "keys"}:
                raise ValueError("unknown fields")
            return cls(TrustedKey(**entry) for entry in document["keys"])
        except (TypeError, ValueError, AttributeError) as error:
            raise ArtifactError(
                f"{name} is not a trust store ({error}); take it from its owner again"
            ) from error

    @classmethod
    def load(cls, path: Path) -> TrustStore:
        """Reads a trust file."""
        try:
            data = path.read_bytes()
        except OSError as error:
            raise ArtifactError(
                f"trust store {path} cannot be read: {error.strerror}; name the file its owner gave"
            ) from error
        return cls.parse(data, path.name)

    def to_json(self) -> dict[str, Any]:
        """The content of a trust file, without its schema."""
        return {"keys": [vars(key) for key in self.keys]}

    def save(self, path: Path) -> None:
        """Writes a trust file."""
        write_json(path, TRUST_SCHEMA, self.to_json())

    def bundle_keys(self) -> list[EllipticCurvePublicKey]:
        """The P-256 keys believed to sign bundles."""
        return [
            EllipticCurvePublicKey.from_encoded_point(SECP256R1(), bytes.fromhex(key.public_key))
            for key in self.keys
            if key.role == "bundle"
        ]

    def verify(self, body: Mapping[str, Any], signature: object, role: str, name: str) -> None:
        """Checks the signature of a body without `signature`.

        Raises:
          SignatureInvalid: missing, malformed, by a key not believed in the role, or not of this
            content.
        """
        fields = cast("dict[str, object]", signature) if isinstance(signature, dict) else {}
        if set(fields) != {"key_id", "algorithm", "value"}:
            raise SignatureInvalid(f"{name} is not signed; only signed documents count")
        key_id, value = str(fields["key_id"]), str(fields["value"])
        public = self._public.get((role, key_id))
        if public is None or fields["algorithm"] != _ALGORITHM:
            raise SignatureInvalid(
                f"{name} is signed by key {key_id!r}, which the trust store does not believe in "
                f"the role {role!r}; check where it comes from"
            )
        try:
            raw = bytes.fromhex(value)
            if raw.hex() != value:
                raise ValueError("not canonical")
            public.verify(raw, _message(role, body))
        except (InvalidSignature, ValueError, TypeError, ArtifactError) as error:
            raise SignatureInvalid(
                f"the signature of {name} does not fit its content; it was changed after signing"
            ) from error

    def verify_bytes(self, data: bytes, value: bytes, role: str, key_id: str, name: str) -> None:
        """Checks a signature made by `Signer.sign_bytes`.

        Raises:
          SignatureInvalid: as in `verify`.
        """
        public = self._public.get((role, key_id))
        try:
            if public is None:
                raise ValueError("unknown key")
            public.verify(value, data)
        except (InvalidSignature, ValueError) as error:
            raise SignatureInvalid(
                f"the signature of {name} is not by a key believed in the role {role!r}, or does "
                "not fit its content"
            ) from error


def bundle_signing_key(store: KeyStore) -> EllipticCurvePrivateKey:
    """The P-256 key of the role `bundle`, created at first use."""
    secret = derive(store.load_or_create("signing/bundle"), "p256", "bundle")
    return derive_private_key(int.from_bytes(secret, "big") % (_P256_ORDER - 1) + 1, SECP256R1())


def trusted_bundle_key(key: EllipticCurvePrivateKey) -> TrustedKey:
    """The public half of a bundle key, to be pinned."""
    point = key.public_key().public_bytes(Encoding.X962, PublicFormat.CompressedPoint).hex()
    return TrustedKey(_key_id(point), "bundle", point)


def trust_of(store: KeyStore) -> TrustStore:
    """The trust store of one's own keys, all roles, created at first use."""
    own = [Signer.load_or_create(store, role).trusted() for role in ROLES if role != "bundle"]
    return TrustStore([*own, trusted_bundle_key(bundle_signing_key(store))])


def sign_document(document: Mapping[str, Any], signer: Signer) -> dict[str, Any]:
    """Returns the document with `signature: {key_id, algorithm, value}` added or replaced."""
    body = {key: value for key, value in document.items() if key != "signature"}
    return {**body, "signature": signer.sign(body)}


def verify_document(document: Mapping[str, Any], trust: TrustStore, role: str) -> dict[str, Any]:
    """Checks a signed document and returns it without its signature.

    Raises:
      SignatureInvalid: the signature is missing, by an unknown key, or not of this content.
    """
    body = {key: value for key, value in document.items() if key != "signature"}
    name = str(document.get("schema", document.get("kind", "the document")))
    trust.verify(body, document.get("signature"), role, name)
    return body
