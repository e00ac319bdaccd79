"""A time limit for work with a service that may not answer."""

from __future__ import annotations

import threading
from collections.abc import Callable


def in_time(work: Callable[[], str], seconds: float, late: str) -> str:
    """Returns the result of `work`, which never raises; `late` if it takes longer than `seconds`.

    The work runs in a thread that cannot keep the process alive.
    """
    found = [late]
    thread = threading.Thread(target=lambda: found.append(work()), daemon=True)
    try:
        thread.start()
    except RuntimeError:
        return "no thread can be started"
    thread.join(seconds)
    return found[-1]
