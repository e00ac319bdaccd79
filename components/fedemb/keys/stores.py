"""Key stores on a file system, their interface, and keys derived from theirs."""

from __future__ import annotations

import contextlib
import hmac
import os
import re
import stat
from abc import ABC, abstractmethod
from collections.abc import Generator
from pathlib import Path

from typing_extensions import override

from fedemb.errors import LedgerError, Refused, StorageError
from fedemb.foundation.files import create_bytes, make_folder, read_regular

KEY_BYTES = 32
DESTROYED = ".destroyed"
"""Suffix of the file that records the destruction of a local key; key names must not end in it."""
_ID = r"[A-Za-z0-9][A-Za-z0-9._-]{0,190}"
_NUMBER = r"[1-9][0-9]*"
_NAME = re.compile(
    rf"policy/{_ID}|reservation/{_ID}|signing/{_ID}(@{_NUMBER})?|ledger/{_ID}\+(run-)?{_NUMBER}"
)


def checked_name(name: str) -> str:
    """Returns the key name if it is safe in paths and services; refuses it otherwise."""
    if not _NAME.fullmatch(name) or name.endswith(DESTROYED):
        raise Refused(
            f"key name {name!r} is not policy/<id>, reservation/<run>-<attempt> or signing/<role> "
            "in letters, digits, dot, dash and underscore; choose another run id or policy id"
        )
    return name


def generation_name(name: str, generation: int) -> str:
    """Returns the key name of a generation of a signing key; the first has no suffix."""
    return name if generation == 1 else f"{name}@{generation}"


def reservation_key_name(run_id: str, attempt: int) -> str:
    """Returns the name of the root key of one attempt."""
    return f"reservation/{run_id}-{attempt}"


class KeyStore(ABC):
    """Named secrets of 32 bytes, each created once and never overwritten.

    Every method raises StorageError if the store cannot be reached, read or written.
    """

    uri: str

    @abstractmethod
    def create(self, name: str, key: bytes | None = None) -> bytes:
        """Creates the key from operating-system entropy and returns it.

        Checks for the key before it writes, so that a step can be repeated with only the right to
        create.

        Args:
          name: name that was never used before.
          key: 32 bytes to store instead of entropy.

        Raises:
          FileExistsError: the name is in use, or its key was destroyed.
        """

    @abstractmethod
    def fetch(self, name: str) -> bytes:
        """Returns the key.

        Raises:
          LedgerError: the key does not exist or was destroyed.
          StorageError: other accounts may read the key.
        """

    @abstractmethod
    def destroy(self, name: str) -> None:
        """Destroys the key permanently; idempotent."""

    @abstractmethod
    def exists(self, name: str) -> bool:
        """Returns whether `fetch` would find the key."""

    @abstractmethod
    def used(self, name: str) -> bool:
        """Returns whether the name was ever used, including by a key destroyed since."""

    @abstractmethod
    def newest(self, name: str) -> int:
        """Returns the number of the newest generation of a signing key; 0 if no key exists."""

    @abstractmethod
    def renew(self, name: str) -> int:
        """Creates the next generation, keeps the earlier ones, and returns its number."""

    def _whole(self, name: str, key: bytes) -> bytes:
        """Returns a fetched key; raises LedgerError if its length is wrong."""
        if len(key) != KEY_BYTES:
            raise LedgerError(
                f"key {name} in {self.uri} has {len(key)} bytes, expected {KEY_BYTES}; restore it "
                "or reserve under a new run id"
            )
        return key

    def load_or_create(self, name: str) -> bytes:
        """Returns the key; creates it first if the name was never used.

        Checks for the key before it creates one, because most steps may only read keys.
        """
        if not self.exists(name):
            with contextlib.suppress(FileExistsError):  # destroyed, or created concurrently
                return self.create(name)
        return self.fetch(name)


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


def commit_to_users(key: bytes, run_id: str, attempt: int, digest: str) -> str:
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


class LocalKeyStore(KeyStore):
    """Keys as files; an empty file `<key>.destroyed` records that a key was destroyed."""

    def __init__(self, root: Path):
        self.root = root
        self.uri = str(root)

    @override
    def create(self, name: str, key: bytes | None = None) -> bytes:
        path = self._path(name)
        with self._reached(name):
            if self._destroyed(path).exists():
                raise FileExistsError(f"key {name} was destroyed and its name is not used again")
            make_folder(self.root.parent)
            for folder in (self.root, path.parent.parent, path.parent):
                folder.mkdir(mode=0o700, exist_ok=True)
            key = key or os.urandom(KEY_BYTES)
            self._check_folders(path)
            create_bytes(path, key, mode=0o600)
        return key

    @override
    def fetch(self, name: str) -> bytes:
        path = self._path(name)
        with self._reached(name):
            destroyed = self._destroyed(path).exists()
            if destroyed or not path.exists():  # both: killed while destroying
                raise LedgerError(self._missing(name, destroyed))
            self._check_folders(path)
            key = read_regular(path)
            mode = stat.S_IMODE(path.stat().st_mode)
        if mode & 0o077:
            raise StorageError(
                f"key {name} in {self.uri} has mode {mode:04o}, expected 0600, so other "
                "users may read it. Create a new policy, or chmod 600 the key if it was not read"
            )
        return self._whole(name, key)

    @override
    def destroy(self, name: str) -> None:
        path = self._path(name)
        with self._reached(name):
            if path.exists():
                with contextlib.suppress(FileExistsError):
                    create_bytes(self._destroyed(path), b"", mode=0o600)
            # A killed creation leaves a temporary name, possibly a link to this file.
            for copy in (*path.parent.glob(f".{path.name}.????????"), path):
                with contextlib.suppress(FileNotFoundError):
                    _overwrite(copy)

    @override
    def exists(self, name: str) -> bool:
        path = self._path(name)
        with self._reached(name):
            return path.is_file() and not self._destroyed(path).exists()

    @override
    def used(self, name: str) -> bool:
        path = self._path(name)
        with self._reached(name):
            return path.exists() or self._destroyed(path).exists()

    @override
    def newest(self, name: str) -> int:
        path = self._path(name)
        with self._reached(name):
            later = (item.name.rpartition("@")[2] for item in path.parent.glob(f"{path.name}@*"))
            return max(
                [int(path.exists()), *(int(number) for number in later if number.isdecimal())]
            )

    @override
    def renew(self, name: str) -> int:
        while True:
            number = self.newest(name) + 1
            with contextlib.suppress(FileExistsError):  # another process renewed it concurrently
                self.create(generation_name(name, number))
                return number

    def _path(self, name: str) -> Path:
        kind, _, rest = checked_name(name).partition("/")
        if kind != "signing":
            return self.root / kind / rest
        # One folder per role, because on a cluster each can be a separate volume.
        return self.root / kind / rest.partition("@")[0] / rest

    def _check_folders(self, path: Path) -> None:
        """Refuses a folder in which every account may replace keys.

        The cluster sets the modes of a mounted volume, and only processes of the pod can access it.

        Raises:
          StorageError: names the folder.
        """
        for folder in (path.parent, *path.parent.parents):
            if stat.S_IMODE(folder.stat().st_mode) & 0o002 and not os.path.ismount(folder):
                raise StorageError(
                    f"folder {folder} of the key store has mode "
                    f"{stat.S_IMODE(folder.stat().st_mode):04o}, so any user may replace its keys. "
                    "Create a new policy, or chmod 700 the folder if no key was replaced"
                )
            if folder == self.root:
                return

    def _destroyed(self, path: Path) -> Path:
        return path.with_name(path.name + DESTROYED)

    @contextlib.contextmanager
    def _reached(self, name: str) -> Generator[None]:
        """Converts file system errors to StorageError."""
        try:
            yield
        except FileExistsError:
            raise
        except OSError as error:
            raise StorageError(
                f"key {name} in {self.uri} cannot be reached: {error.strerror}; run as the owner "
                "of the key store"
            ) from error

    def _missing(self, name: str, destroyed: bool) -> str:
        if destroyed:
            return f"key {name} was destroyed when its run was committed; start a new run"
        made = "the ledger was made with"
        if name.startswith("reservation/"):
            made = "the reservation was made with, or reserve under a new run id"
        return f"key {name} is not in the key store {self.uri}; name the key store {made}"


def _overwrite(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(os.urandom(KEY_BYTES))
        file.flush()
        os.fsync(file.fileno())
    path.unlink(missing_ok=True)
