"""Secret keys: created once, kept apart from the ledger, destroyed when their use is over.

Every secret is 32 bytes of operating-system entropy under a name that says what it is for:
`policy/<policy_id>` lives as long as the policy (partition and commitments are derived from it),
`reservation/<run_id>-<attempt>` is the root of one attempt's coins and noise and is destroyed at
commit, `reservation/<run_id>-<attempt>+unbound` is destroyed before the attempt reads its first
private byte, `signing/<role>` signs (`signing/<role>@<n>`: its n-th generation),
`deletion_marks/<policy_id>+<n>` says that the policy has n deletion marks, and
`ledger/<policy_id>+<n>` holds the digest of the n-th record that charged it. A name is used once: a
destroyed key keeps its name taken, so that one reservation never gets a second root, and with it a
second, independent noise.

Specification: docs/privacy/noise.md#keys-of-a-round.
"""

from __future__ import annotations

import contextlib
import re
from abc import ABC, abstractmethod

from fedemb.errors import Refused

KEY_BYTES = 32
DESTROYED = ".destroyed"
"""Ending of the file that says a local key was destroyed; no key may be named so."""
_ID = r"[A-Za-z0-9][A-Za-z0-9._-]{0,190}"
_NUMBER = r"[1-9][0-9]*"
_NAME = re.compile(
    rf"policy/{_ID}|reservation/{_ID}(\+unbound)?|signing/{_ID}(@{_NUMBER})?|(deletion_marks|ledger)/{_ID}\+{_NUMBER}"
)


def checked_name(name: str) -> str:
    """Returns a key name that is safe in paths and services, or refuses it."""
    if not _NAME.fullmatch(name) or name.endswith(DESTROYED):
        raise Refused(
            f"key name {name!r} is not policy/<id>, reservation/<run>-<attempt> or signing/<role> "
            "in letters, digits, dot, dash and underscore; choose another run id or policy id"
        )
    return name


def generation_name(name: str, generation: int) -> str:
    """Name of a generation of a signing key; the first has none."""
    return name if generation == 1 else f"{name}@{generation}"


def reservation_key_name(run_id: str, attempt: int) -> str:
    """Name of the root key of one attempt."""
    return f"reservation/{run_id}-{attempt}"


def unbound_key_name(run_id: str, attempt: int) -> str:
    """Name of a key that says nothing but that the attempt was not bound: then it is destroyed.

    A ledger that was put back to before that cannot give the charge back, or bind it again.
    """
    return f"{reservation_key_name(run_id, attempt)}+unbound"


class KeyStore(ABC):
    """Named secrets of 32 bytes, each created once and never overwritten.

    Every method raises StorageError where the store cannot be reached, read or written.
    """

    uri: str

    @abstractmethod
    def create(self, name: str, key: bytes | None = None) -> bytes:
        """Creates the key from operating-system entropy and returns it.

        Looks before it writes: a step repeats itself with the right to create and no other.

        Args:
          name: never used before.
          key: 32 bytes to be kept in place of entropy.

        Raises:
          FileExistsError: the name is in use, or was and is destroyed.
        """

    @abstractmethod
    def fetch(self, name: str) -> bytes:
        """Returns the key.

        Raises:
          LedgerError: there is no such key, or it is destroyed.
          StorageError: others may read the key.
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
