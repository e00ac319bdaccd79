"""Fencing tokens: if a step is started twice, only the newest start may write.

A cluster may start a pod again while the first pod still runs on a node that the cluster lost
contact with. Each start creates the next number exclusively below `fencing_tokens/`. A start that
finds a higher number than its own is superseded, and ends before it changes anything else.

A process can be paused between the check and the change that follows. Fencing tokens therefore do
not replace exclusive creation where two writers must not both succeed (rounds, ledger records).
They prevent a late start from replacing or deleting objects, except for a change in progress.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import count
from pathlib import Path

from fedemb.errors import Superseded
from fedemb.storage import Entry, Store, open_store

TOKENS = "fencing_tokens"

_TAKEN: ContextVar[list[FencingToken] | None] = ContextVar("tokens_taken", default=None)


@contextmanager
def tokens_taken() -> Iterator[list[FencingToken]]:
    """While entered, collects the fencing tokens that this process takes, in order."""
    taken: list[FencingToken] = []
    token = _TAKEN.set(taken)
    try:
        yield taken
    finally:
        _TAKEN.reset(token)


class FencingToken:
    """The fencing token of one start of a step, in a store that all its starts share.

    It may be passed to workers in other processes.
    """

    def __init__(self, uri: str, step: str) -> None:
        self._uri, self._step = uri, step
        store = open_store(uri)
        for number in count(len(store.list(f"{TOKENS}/")) + 1):
            try:
                store.create(_name(number), b"")
            except FileExistsError:
                continue
            self._number = number
            taken = _TAKEN.get()
            if taken is not None:
                taken.append(self)
            return

    @property
    def number(self) -> int:
        """Number of the token: a later start has a higher number."""
        return self._number

    def over(self) -> bool:
        """Returns whether a later start exists."""
        return open_store(self._uri).exists(_name(self._number + 1))

    def check(self) -> None:
        """Checks that no later start exists.

        Raises:
          Superseded: a later start exists.
        """
        if self.over():
            raise Superseded(
                f"{self._step} was started again while this process was running, and only the "
                "newest start may write. No action is needed; see the later pod."
            )


class FencedStore(Store):
    """A store that rejects changes once its fencing token is superseded."""

    def __init__(self, store: Store, token: FencingToken) -> None:
        self._store, self._token = store, token
        self.uri, self.local_root = store.uri, store.local_root

    def read_up_to(self, name: str, limit: int) -> bytes | None:
        """Reads an object of limited size; see `Store.read_up_to`."""
        return self._store.read_up_to(name, limit)

    def write(self, name: str, data: bytes) -> None:
        """Writes an object if the token is current; see `Store.write`."""
        self._token.check()
        self._store.write(name, data)

    def create(self, name: str, data: bytes) -> None:
        """Creates an object if the token is current; see `Store.create`."""
        self._token.check()
        self._store.create(name, data)

    def exists(self, name: str) -> bool:
        """Returns whether an object exists; see `Store.exists`."""
        return self._store.exists(name)

    def entries(self, prefix: str = "") -> Iterator[Entry]:
        """Yields objects; see `Store.entries`."""
        return self._store.entries(prefix)

    def delete(self, name: str) -> None:
        """Deletes an object if the token is current; see `Store.delete`."""
        self._token.check()
        self._store.delete(name)

    def digest(self, name: str) -> str | None:
        """Returns the digest of an object; see `Store.digest`."""
        return self._store.digest(name)

    def _upload(self, local: Path, name: str, digest: str) -> None:
        self._token.check()
        self._store._upload(local, name, digest)

    def _download(self, name: str, local: Path) -> None:
        self._store._download(name, local)


def _name(number: int) -> str:
    return f"{TOKENS}/{number:06d}"
