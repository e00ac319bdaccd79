"""Secret keys: created once, kept separate from the ledger, destroyed after use.

Every secret is 32 bytes of operating-system entropy. Its name states its purpose:

- `policy/<policy_id>`: partition and commitment keys are derived from it. It lives as long as the
  policy.
- `reservation/<run_id>-<attempt>`: root of the coins and noise of one attempt, destroyed at commit.
- `reservation/<run_id>-<attempt>+unbound`: destroyed before the attempt reads its first private
  byte.
- `signing/<role>`: signing key of a role; `signing/<role>@<n>` is its n-th generation.
- `ledger/<policy_id>+<n>`: digest of the n-th record that charged the policy.

A name is used only once, and the name of a destroyed key stays taken. So one reservation never gets
a second root, which would give a second, independent noise.

Specification: docs/privacy/noise.md#keys-of-a-round.
"""

from __future__ import annotations

import contextlib
import re
from abc import ABC, abstractmethod

from fedemb.errors import LedgerError, Refused

KEY_BYTES = 32
DESTROYED = ".destroyed"
"""Suffix of the file that records the destruction of a local key; key names must not end in it."""
_ID = r"[A-Za-z0-9][A-Za-z0-9._-]{0,190}"
_NUMBER = r"[1-9][0-9]*"
_NAME = re.compile(
    rf"policy/{_ID}|reservation/{_ID}(\+unbound)?|signing/{_ID}(@{_NUMBER})?|ledger/{_ID}\+{_NUMBER}"
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


def unbound_key_name(run_id: str, attempt: int) -> str:
    """Returns the name of the key that exists until the attempt is bound, and is then destroyed.

    A ledger restored to a state before the binding can neither refund the charge nor bind it again.
    """
    return f"{reservation_key_name(run_id, attempt)}+unbound"


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
