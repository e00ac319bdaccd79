"""Secret keys: created once, kept apart from the ledger, destroyed when their use is over.

Every secret is 32 bytes of operating-system entropy under a name that says what it is for:
`policy/<policy_id>` lives as long as the policy (partition and commitments are derived from it),
`reservation/<run_id>-<attempt>` is the root of one attempt's coins and noise and is destroyed at
commit, `signing/<role>` signs (`signing/<role>@<n>`: its n-th generation),
`tombstones/<policy_id>+<n>` says that the policy has n tombstones. A name is used once: a destroyed
key leaves a tombstone, so that the same reservation can never get a second root, and with it a
second, independent noise.

Specification: dp.md 5 (misuse-resistant key) and 3.2.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import re
import stat
from abc import ABC, abstractmethod
from pathlib import Path
from urllib.parse import unquote, urlsplit

from typing_extensions import override

from fedemb.documents.artifacts import create_bytes
from fedemb.errors import LedgerError, Refused, StorageError

KEY_BYTES = 32
_WORD = r"[A-Za-z0-9][A-Za-z0-9._-]{0,190}"
_NAME = re.compile(
    rf"(policy|reservation)/{_WORD}|signing/{_WORD}(@[1-9][0-9]*)?|tombstones/{_WORD}\+[1-9][0-9]*"
)
_DESTROYED = ".destroyed"


def checked_name(name: str) -> str:
    """Returns a key name that is safe in paths and services, or refuses it."""
    if not _NAME.fullmatch(name) or name.endswith(_DESTROYED):
        raise Refused(
            f"key name {name!r} is not policy/<id>, reservation/<run>-<attempt> or signing/<role> "
            "in letters, digits, dot, dash and underscore; choose another run id or policy id"
        )
    return name


def generation_name(name: str, generation: int) -> str:
    """Name of a generation of a signing key; the first has none."""
    return name if generation == 1 else f"{name}@{generation}"


class KeyStore(ABC):
    """Named secrets of 32 bytes, each created once and never overwritten."""

    uri: str

    @abstractmethod
    def create(self, name: str) -> bytes:
        """Creates the key from operating-system entropy and returns it.

        Looks before it writes: a step repeats itself with the right to create and no other.

        Raises:
          FileExistsError: the name is in use, or was and is destroyed.
          StorageError: the store cannot be written.
        """

    @abstractmethod
    def fetch(self, name: str) -> bytes:
        """Returns the key.

        Raises:
          LedgerError: there is no such key, or it is destroyed.
          StorageError: the store cannot be read, or others may read the key.
        """

    @abstractmethod
    def destroy(self, name: str) -> None:
        """Destroys the key for good; no error if that was done before."""

    @abstractmethod
    def exists(self, name: str) -> bool:
        """Whether `fetch` would find the key."""

    @abstractmethod
    def used(self, name: str) -> bool:
        """Whether the name was ever used, by a key that may be destroyed since."""

    @abstractmethod
    def newest(self, name: str) -> int:
        """Number of the newest generation of a signing key; 0 if there is none."""

    @abstractmethod
    def renew(self, name: str) -> int:
        """Creates a further generation beside the earlier ones and returns its number."""

    def load_or_create(self, name: str) -> bytes:
        """Returns the key, created first if the name was never used.

        Looks before it creates: most steps may read their keys and create none.
        """
        if not self.exists(name):
            with contextlib.suppress(FileExistsError):  # destroyed, or made at this moment
                return self.create(name)
        return self.fetch(name)


class LocalKeyStore(KeyStore):
    """Files of mode 0600 in folders of mode 0700."""

    def __init__(self, root: Path):
        self.root = root
        self.uri = str(root)

    @override
    def create(self, name: str) -> bytes:
        path = self._path(name)
        if self._tombstone(path).exists():
            raise FileExistsError(f"key {name} was destroyed and its name is not used again")
        for folder in (self.root, path.parent):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        key = os.urandom(KEY_BYTES)
        create_bytes(path, key, mode=0o600)
        return key

    @override
    def fetch(self, name: str) -> bytes:
        path = self._path(name)
        if self._tombstone(path).exists():  # killed while destroying: what is left is no key
            raise LedgerError(self._missing(name, path))
        try:
            key = path.read_bytes()
            mode = stat.S_IMODE(path.stat().st_mode)
        except FileNotFoundError as error:
            raise LedgerError(self._missing(name, path)) from error
        except OSError as error:
            raise StorageError(
                f"key {name} in {self.uri} cannot be read: {error.strerror}; run as its owner"
            ) from error
        if mode & 0o077:
            raise StorageError(
                f"key {name} in {self.uri} has mode {mode:04o}, expected 0600, so others may read "
                f"it; make a new policy, or, if surely nobody did, chmod 600 it"
            )
        if len(key) != KEY_BYTES:
            raise LedgerError(
                f"key {name} in {self.uri} has {len(key)} bytes, expected {KEY_BYTES}; restore it "
                "or reserve anew"
            )
        return key

    @override
    def destroy(self, name: str) -> None:
        path = self._path(name)
        if not path.exists():
            return
        with contextlib.suppress(FileExistsError):
            create_bytes(self._tombstone(path), b"", mode=0o600)
        with path.open("r+b") as file:
            file.write(os.urandom(KEY_BYTES))
            file.flush()
            os.fsync(file.fileno())
        path.unlink(missing_ok=True)

    @override
    def exists(self, name: str) -> bool:
        path = self._path(name)
        return path.is_file() and not self._tombstone(path).exists()

    @override
    def used(self, name: str) -> bool:
        path = self._path(name)
        return path.exists() or self._tombstone(path).exists()

    @override
    def newest(self, name: str) -> int:
        path = self._path(name)
        later = (item.name.rpartition("@")[2] for item in path.parent.glob(f"{path.name}@*"))
        return max([int(path.exists()), *(int(number) for number in later if number.isdigit())])

    @override
    def renew(self, name: str) -> int:
        while True:
            number = self.newest(name) + 1
            with contextlib.suppress(FileExistsError):  # somebody else renewed it at this moment
                self.create(generation_name(name, number))
                return number

    def _path(self, name: str) -> Path:
        return self.root / checked_name(name)

    def _tombstone(self, path: Path) -> Path:
        return path.with_name(path.name + _DESTROYED)

    def _missing(self, name: str, path: Path) -> str:
        if self._tombstone(path).exists():
            return f"key {name} was destroyed when its run was committed; start a new run"
        made = "the ledger was made with"
        if name.startswith("reservation/"):
            made = "the reservation was made with, or reserve under a new run id"
        return f"key {name} is not in the key store {self.uri}; name the key store {made}"


def open_key_store(uri: str) -> KeyStore:
    """Opens a key store: a folder (path or `file:///path`) or `gsm://project[/prefix]`.

    Raises:
      StorageError: no such kind of store, or it cannot be reached. Object stores are refused: they
        keep versions and copies of what was destroyed.
    """
    parts = urlsplit(uri)
    if parts.scheme == "gsm":
        from fedemb.keys.secret_manager import SecretManagerKeyStore

        return SecretManagerKeyStore(parts.netloc, parts.path.strip("/") or "fedemb")
    if parts.scheme == "file":
        return LocalKeyStore(Path(unquote(parts.path)))
    if parts.scheme and "://" in uri:
        raise StorageError(
            f"key store {uri!r} is neither a folder nor gsm://project; object stores keep copies "
            "of destroyed keys, so name a folder or Secret Manager"
        )
    return LocalKeyStore(Path(uri))


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


def partition_key(store: KeyStore, policy_id: str) -> bytes:
    """Key of user id hashing: fixed for the policy's life, created at its first use."""
    return derive(store.load_or_create(f"policy/{policy_id}"), "partition")


def commitment_key(store: KeyStore, policy_id: str) -> bytes:
    """Key of commitments to private data."""
    return derive(store.load_or_create(f"policy/{policy_id}"), "commitment")


def reservation_key_name(run_id: str, attempt: int) -> str:
    """Name of the root key of one attempt."""
    return f"reservation/{run_id}-{attempt}"


def commit_to(key: bytes, data: bytes) -> str:
    """Keyed commitment to private data, 64 hexadecimal digits.

    A plain digest would tell the adversary of the definition which of two data sets it was.
    """
    return derive(key, "commitment/1", data).hex()
