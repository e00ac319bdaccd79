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


def use_one_blas_thread() -> None:
    """Limits BLAS to one thread for the rest of the process.

    The rounding of eigenvectors and products depends on the number of threads, so a training could
    not be repeated bit for bit on a machine with more or fewer cores. The threads of BLAS also wait
    for each other actively, which makes small products ten times slower on shared cores.
    """
    _libraries().limit(limits=1, user_api="blas")


def on_all_cores(act: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """Yields `act` of each item, in order, computed by a thread per core.

    At most twice as many items as cores are taken ahead. BLAS uses one thread from then on.

    >>> list(on_all_cores(abs, [-2, 1]))
    [2, 1]
    """
    cores, waiting = available_cores(), deque[Future[Result]]()
    use_one_blas_thread()
    with ThreadPoolExecutor(cores) as pool:
        for item in items:
            waiting.append(pool.submit(act, item))
            if len(waiting) > 2 * cores:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
