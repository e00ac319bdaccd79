"""Children of a process that runs tests: forked, limited in time, with files of their own."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

WAITS = 12.0
"""A child may take so many times its processor seconds by the clock: other work slows it down."""


def in_child(act: Callable[[], None], seconds: float) -> int | None:
    """Runs `act`, which never returns, in a forked child with so many processor seconds.

    Returns:
      Its exit code; None where it was stopped for taking too long.
    """
    with _scratch() as folder:
        child = os.fork()
        if child == 0:
            os.setpgrp()
            limit = int(seconds) + 1
            resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
            os.environ["TMPDIR"] = tempfile.tempdir = folder
            act()
            os._exit(70)
        return _waited(child, WAITS * seconds)


def _waited(child: int, seconds: float) -> int | None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            return None if code in (-signal.SIGKILL, -signal.SIGXCPU) else code
        time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def quiet(log: str | Path) -> None:
    """Sends the output of this process to a file."""
    output = os.open(log, os.O_CREAT | os.O_WRONLY)
    os.dup2(output, 1)
    os.dup2(output, 2)


@contextlib.contextmanager
def _scratch() -> Iterator[str]:
    """A folder for temporary files, in memory where there is room."""
    memory = Path("/dev/shm")
    roomy = memory.is_dir() and shutil.disk_usage(memory).free > 4 << 30
    folder = tempfile.mkdtemp(prefix="mutant-", dir=memory if roomy else None)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
