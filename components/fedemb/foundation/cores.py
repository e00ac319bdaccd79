"""Numeric work on all cores."""

# threadpoolctl ships no types.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false

from __future__ import annotations

import functools
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from threadpoolctl import ThreadpoolController

Item = TypeVar("Item")
Result = TypeVar("Result")


def available_cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@functools.cache
def _libraries() -> ThreadpoolController:
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController()


def on_all_cores(act: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """Yields `act` of each item, in order, computed by a thread per core.

    Meanwhile, BLAS uses one thread: its own threads wait for each other actively, which makes small
    products more than ten times slower on cores that are shared. At most twice as many items as
    cores are taken ahead.

    >>> list(on_all_cores(abs, [-2, 1]))
    [2, 1]
    """
    cores, waiting = available_cores(), deque[Future[Result]]()
    with _libraries().limit(limits=1, user_api="blas"), ThreadPoolExecutor(cores) as pool:
        for item in items:
            waiting.append(pool.submit(act, item))
            if len(waiting) > 2 * cores:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
