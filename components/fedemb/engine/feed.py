"""Samples and loads virtual clients while the previous ones train. Raw."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Self, TypeVar

from fedemb.engine.rounds import Slab
from fedemb.engine.training_round import TrainingRound
from fedemb.privacy.queries import Mechanism
from fedemb.privacy.randomness.sampling import Index, VirtualClient

_Unit = TypeVar("_Unit")
_AHEAD = 2
"""Maximum number of waiting slabs; with the maximum slab size, this limits memory."""


class Feed:
    """Slabs of all remaining rounds, produced ahead of time by one thread.

    Args:
      function: packs the virtual clients.
      mechanism: mechanism of the attempt; samples the virtual clients of a round.
      first: number of the first round; the plan sets the last round.
      index: users of each virtual client, a `sampling.Index`.
      load: reads the examples of a `sampling.VirtualClient`.
      prepare: called with all virtual clients of a round before they are loaded; None does nothing.
    """

    def __init__(
        self,
        function: TrainingRound[_Unit],
        mechanism: Mechanism,
        *,
        first: int,
        index: Index,
        load: Callable[[VirtualClient], _Unit],
        prepare: Callable[[Sequence[VirtualClient]], None] | None = None,
    ) -> None:
        self._queue: queue.Queue[Slab | BaseException | None] = queue.Queue(_AHEAD)
        self._stop = threading.Event()

        def work() -> None:
            try:
                for number in range(first, mechanism.plan.rounds):
                    clients = mechanism.sample_clients(number, index)
                    if prepare is not None:
                        prepare(clients)
                    for slab in function.slabs(map(load, clients), number):
                        if not self._put(slab):
                            return
                    if not self._put(None):
                        return
            except BaseException as error:
                self._put(error)

        self._thread = threading.Thread(target=work, name="client-feed", daemon=True)
        self._thread.start()

    def _put(self, item: Slab | BaseException | None) -> bool:
        while not self._stop.is_set():
            try:
                self._queue.put(item, timeout=0.1)
            except queue.Full:
                continue
            return True
        return False

    def next_round(self) -> Iterator[Slab]:
        """Yields the slabs of the next round; raises errors of the thread."""
        while (item := self._queue.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Stops the thread."""
        self._stop.set()
        self._thread.join()
