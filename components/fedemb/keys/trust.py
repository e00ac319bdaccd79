"""Trusted public keys: pinned keys, each in one role, and the keys that they lead to by rotation.

A key stored with a document proves nothing. Signatures are verified with a `TrustStore` from
another source.

A ledger record rotates keys. The policy owner signs the record with a key trusted so far. The
record names the next generation of keys, which is trusted from then on, and retires the previous
generation. Retired keys stay trusted only for signatures made before the record. So only the first
keys must be pinned: the ledger, and its copy in a bundle, leads from them to the newest keys.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from fedemb.errors import ArtifactError, LedgerError, SignatureInvalid, StorageError
from fedemb.foundation.canonical_json import (
    Json,
    JsonObject,
    ToJson,
    canonical_json,
    json_digest,
    parse_json,
)
from fedemb.foundation.document import D, Document, Written, write, write_json
from fedemb.foundation.files import read_regular
from fedemb.keys.stores import KeyStore, derive, generation_name

ROLES = (
    *("policy", "ledger"),
    *("plan", "pretrain", "partition", "trainer", "evaluate", "audit", "report", "gate"),
    "release",
)
"""Roles, in order: policies and waivers; records and reservations; documents of steps; bundles."""
APPROVER = "approver"
"""Role of people who approve releases. Each has a separate key, which is not in a key store."""
ALGORITHM = "ed25519"
TRUST_SCHEMA = "fedemb/trust/1"


def message(role: str, body: Mapping[str, ToJson] | bytes) -> bytes:
    """Returns the bytes that a signature covers, of a body or of its canonical JSON."""
    content = body if isinstance(body, bytes) else canonical_json(dict(body))
    return b"fedemb/signature/1\0" + role.encode() + b"\0" + content


def key_id_of(public_key: str) -> str:
    """Returns the short name of a public key."""
    return hashlib.sha256(bytes.fromhex(public_key)).hexdigest()[:32]


@dataclass(frozen=True)
class TrustedKey:
    """A public key, raw Ed25519 in hexadecimal digits, and the one role it is trusted in."""

    key_id: str
    role: str
    public_key: str
    generation: int = 1

    @classmethod
    def of_json(cls, entry: Json) -> TrustedKey:
        """Reads a key of `to_json`.

        Raises:
          ValueError: a field is missing, unknown or of another type.
        """
        match entry:
            case {
                "key_id": str(key_id),
                "role": str(role),
                "public_key": str(public_key),
                "generation": int(generation),
                **rest,
            } if not rest:
                return cls(key_id, role, public_key, generation)
            case _:
                raise ValueError("an entry is not a key")

    def to_json(self) -> JsonObject:
        """Returns the key as trust files and ledger records store it."""
        return {**vars(self)}


class TrustStore:
    """The trusted public keys, each in one role."""

    def __init__(
        self, keys: Iterable[TrustedKey], retired: Mapping[tuple[str, str], int] | None = None
    ):
        """Indexes the keys.

        Args:
          keys: keys of all generations.
          retired: (role, key ID) -> number of the ledger record that retired the key.

        Raises:
          SignatureInvalid: a role is unknown, or a key ID does not match its key.
        """
        self.keys = tuple(sorted(keys, key=lambda key: (key.role, key.generation, key.key_id)))
        self._retired = dict(retired or {})
        for key in self.keys:
            fits = key.role in (*ROLES, APPROVER) and key.key_id == key_id_of(key.public_key)
            if not fits or type(key.generation) is not int or key.generation < 1:
                raise SignatureInvalid(
                    f"trust store entry {key.key_id!r} has an unknown role or does not fit its "
                    "key; take the trust store from its owner again"
                )
        self._public = {
            (key.role, key.key_id): Ed25519PublicKey.from_public_bytes(
                bytes.fromhex(key.public_key)
            )
            for key in self.keys
        }

    @classmethod
    def parse(cls, data: bytes, name: str = "trust.json") -> TrustStore:
        """Parses the bytes of a trust file.

        Raises:
          ArtifactError: the bytes are not a trust file of this version.
          SignatureInvalid: an entry is inconsistent.
        """
        document = parse_json(data, TRUST_SCHEMA, name)
        try:
            if set(document) != {"schema", "keys"}:
                raise ValueError("fields other than schema and keys")
            entries = document["keys"]
            if not isinstance(entries, list):
                raise ValueError("keys is not a list")
            return cls(map(TrustedKey.of_json, entries))
        except (TypeError, ValueError, AttributeError) as error:
            raise ArtifactError(
                f"{name} is not a trust store ({error}); take it from its owner again"
            ) from error

    @classmethod
    def load(cls, path: Path) -> TrustStore:
        """Reads a trust file."""
        try:
            data = read_regular(path)
        except (OSError, ValueError) as error:
            raise ArtifactError(
                f"trust store {path} cannot be read: {getattr(error, 'strerror', error)}; name the "
                "file its owner gave"
            ) from error
        return cls.parse(data, path.name)

    def to_json(self) -> JsonObject:
        """Returns the content of a trust file, without its schema."""
        return {"keys": [key.to_json() for key in self.keys]}

    @property
    def digest(self) -> str:
        """Returns the SHA-256 of the keys, independent of their order in a file."""
        return json_digest(self.to_json())

    def save(self, path: Path) -> None:
        """Writes a trust file."""
        write_json(path, TRUST_SCHEMA, self.to_json())

    def current(self, role: str) -> TrustedKey:
        """Returns the newest key of a role, the only key to sign with.

        Raises:
          SignatureInvalid: no key is trusted in the role.
        """
        found = [key for key in self.keys if key.role == role]
        if not found:
            raise SignatureInvalid(
                f"the trust store holds no key in the role {role!r}; take it from its owner again"
            )
        return found[-1]

    def require(self, key: TrustedKey) -> None:
        """Refuses a key that is not trusted, before its signature is recorded permanently.

        Raises:
          SignatureInvalid: the key is not trusted in its role.
          StorageError: the key was trusted, but another key is trusted now.
        """
        if key not in self.keys:
            raise SignatureInvalid(
                f"key {key.key_id!r} is not trusted in the role {key.role!r}, so no reader "
                "would trust what it signs; name the key store this ledger was made with"
            )
        retired = self._retired_by(key.role, key.key_id, None) is not None
        if retired or (key.role in ROLES and key != self.current(key.role)):
            raise StorageError(
                f"the signing key of the role {key.role!r} was rotated since this step took it; "
                "nothing was written, run the step again"
            )

    def rotated(self, entries: Iterable[JsonObject], sequence: int) -> TrustStore:
        """Returns the trust store after a ledger record with newer keys, at most one per role.

        Raises:
          LedgerError: an entry is not a key, or not of a later generation than the role's key.
        """
        try:
            fresh = [*map(TrustedKey.of_json, entries)]
            before = [self.current(key.role) for key in fresh]
            later = all(
                new.generation > old.generation for new, old in zip(fresh, before, strict=True)
            )
            roles = {key.role for key in fresh}
            if not fresh or not later or len(roles) != len(fresh) or not roles <= set(ROLES):
                raise ValueError("each named role needs exactly one newer key")
            retired = {(key.role, key.key_id): sequence for key in before}
            return TrustStore([*self.keys, *fresh], {**self._retired, **retired})
        except (TypeError, ValueError, SignatureInvalid) as error:
            raise LedgerError(
                f"ledger record {sequence} names new keys and cannot be trusted ({error}); "
                "restore the ledger from its backup"
            ) from error

    def with_approvers(self, public_keys: Iterable[str], sequence: int) -> TrustStore:
        """Returns the trust store after a ledger record with the new complete list of approvers.

        Their keys are raw Ed25519 in hexadecimal digits.

        Keys of earlier approvers that are not in the list are retired permanently. A retired
        approver needs a new key to return.

        Raises:
          LedgerError: an entry is not a key, is listed twice, or was retired before.
        """
        try:
            named = [TrustedKey(key_id_of(key), APPROVER, key) for key in public_keys]
            before = {key for key in self.keys if key.role == APPROVER}
            ids = {key.key_id for key in named}
            if len(ids) != len(named) or any((APPROVER, key) in self._retired for key in ids):
                raise ValueError("a key is listed twice or was retired before")
            leaving = {(APPROVER, key.key_id): sequence for key in before - set(named)}
            fresh = [key for key in named if key not in before]
            return TrustStore([*self.keys, *fresh], {**leaving, **self._retired})
        except (TypeError, ValueError, SignatureInvalid) as error:
            raise LedgerError(
                f"ledger record {sequence} names approvers and cannot be trusted ({error}); "
                "list each approver once, with a key that was never removed"
            ) from error

    def verify(
        self,
        body: Mapping[str, ToJson] | bytes,
        signature: Json | Mapping[str, str],
        role: str,
        name: str,
        *,
        at: int | None = None,
    ) -> None:
        """Checks the signature of a body without `signature`.

        Args:
          body: the signed content, or its canonical JSON.
          signature: the result of `Signer.sign`.
          role: required role of the signature.
          name: name of the document, for the error message.
          at: number of the ledger record at which it was signed; a key that a later record retired
            is accepted. None: now; only keys that are not retired are accepted.

        Raises:
          SignatureInvalid: the signature is missing, malformed, by a key not trusted in the role,
            or not of this content.
        """
        fields = signature if isinstance(signature, Mapping) else {}
        if set(fields) != {"key_id", "algorithm", "value"}:
            raise SignatureInvalid(f"{name} is not signed; run the step that writes it again")
        key_id, value = str(fields["key_id"]), str(fields["value"])
        if fields["algorithm"] != ALGORITHM:
            raise SignatureInvalid(f"{name} is not signed with {ALGORITHM}; check its origin")
        public = self._public_key(role, key_id, at, name)
        try:
            raw = bytes.fromhex(value)
            if raw.hex() != value:
                raise ValueError("the signature is not lower-case hex")
            public.verify(raw, message(role, body))
        except (InvalidSignature, ValueError, TypeError, ArtifactError) as error:
            raise SignatureInvalid(
                f"the signature of {name} does not match its content; restore the signed version"
            ) from error

    def check(self, document: Written[Document], *, at: int | None = None) -> None:
        """Checks that a document is signed in the role of its kind; see `verify` for `at`.

        Raises:
          SignatureInvalid: the document is not signed, or its key is not trusted.
        """
        body = document.body
        name = f"the {body.kind} document"
        self.verify(document.signed_bytes, document.signature, str(body.role), name, at=at)

    def _public_key(self, role: str, key_id: str, at: int | None, name: str) -> Ed25519PublicKey:
        public = self._public.get((role, key_id))
        if public is None:
            raise SignatureInvalid(
                f"{name} is signed by key {key_id!r}, which the trust store does not hold in "
                f"the role {role!r}; check where it comes from"
            )
        record = self._retired_by(role, key_id, at)
        if record is not None:
            raise SignatureInvalid(
                f"{name} is signed by key {key_id!r} of the role {role!r}, which ledger record "
                f"{record} had retired; run the step that signed it again, or check where it "
                "comes from"
            )
        return public

    def _retired_by(self, role: str, key_id: str, at: int | None) -> int | None:
        """Returns the number of the record that had retired a key at record `at`, or None."""
        record = self._retired.get((role, key_id))
        then = at if type(at) is int else math.inf  # `at` may come from a document
        return record if record is not None and record <= then else None


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
        generation = number = 1
        while store.used(name := generation_name(f"signing/{role}", number := number + 1)):
            if store.exists(name):  # else it lost a race for the name and was destroyed
                generation = number
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
