"""Whose turn it is: of a step that was started twice, the one that was started last goes on.

A cluster may start a pod again while the first one still lives, on a node it lost sight of. Each
start takes the next number, exclusively, below `turns/`. Whoever finds a higher one than its own
has been superseded, and ends before it changes anything else.

Between the question and the change it allows a process can still be stopped. So this does not
replace exclusive creation where two may not both succeed (rounds, records of the ledger): it keeps
a late one from what replaces or deletes, where the worst left is a change that was under way.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import count
from pathlib import Path

from fedemb.errors import Superseded
from fedemb.storage import Entry, Store, open_store

TURNS = "turns"


_TAKEN: ContextVar[list[FencingToken] | None] = ContextVar("turns_taken", default=None)


@contextmanager
def turns_taken() -> Iterator[list[FencingToken]]:
    """While entered, collects the turns that this process takes, in order."""
    taken: list[FencingToken] = []
    token = _TAKEN.set(taken)
    try:
        yield taken
    finally:
        _TAKEN.reset(token)


class FencingToken:
    """One start of a step. Workers in other processes may be given it.

    Args:
      uri: the store that all starts of the step share.
      step: its name, for the sentence of the one that loses.
    """

    def __init__(self, uri: str, step: str) -> None:
        self._uri, self._step = uri, step
        store = open_store(uri)
        for number in count(len(store.list(f"{TURNS}/")) + 1):
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
        """The fencing token: a later start has a higher one."""
        return self._number

    def over(self) -> bool:
        """Whether a later start is known."""
        return open_store(self._uri).exists(_name(self._number + 1))

    def check(self) -> None:
        """Goes on only while no later start is known.

        Raises:
          Superseded: there is one.
        """
        if self.over():
            raise Superseded(
                f"{self._step} was started again while this process still ran, and the later one "
                "goes on alone; no action needed; see the later pod"
            )


class FencedStore(Store):
    """A store that changes nothing once its turn is over."""

    def __init__(self, store: Store, turn: FencingToken) -> None:
        self._store, self._turn = store, turn
        self.uri, self.local_root = store.uri, store.local_root

    def read(self, name: str) -> bytes:
        """As the store's."""
        return self._store.read(name)

    def read_up_to(self, name: str, limit: int) -> bytes | None:
        """As the store's."""
        return self._store.read_up_to(name, limit)

    def write(self, name: str, data: bytes) -> None:
        """As the store's, in turn."""
        self._turn.check()
        self._store.write(name, data)

    def create(self, name: str, data: bytes) -> None:
        """As the store's, in turn."""
        self._turn.check()
        self._store.create(name, data)

    def exists(self, name: str) -> bool:
        """As the store's."""
        return self._store.exists(name)

    def list(self, prefix: str = "") -> list[str]:
        """As the store's."""
        return self._store.list(prefix)

    def entries(self, prefix: str = "") -> Iterator[Entry]:
        """As the store's."""
        return self._store.entries(prefix)

    def delete(self, name: str) -> None:
        """As the store's, in turn."""
        self._turn.check()
        self._store.delete(name)

    def digest(self, name: str) -> str | None:
        """As the store's."""
        return self._store.digest(name)

    def _upload(self, local: Path, name: str, digest: str) -> None:
        self._turn.check()
        self._store._upload(local, name, digest)

    def _download(self, name: str, local: Path) -> None:
        self._store._download(name, local)


def _name(number: int) -> str:
    return f"{TURNS}/{number:06d}"
