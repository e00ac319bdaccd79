"""Processes forked from one that has loaded what takes long, and holds no connection.

It loads TensorFlow and its like once for a test session, never our own package. Of `python -m
MODULE WORDS...` a `Forked` program differs in this alone.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from tests.planted_bugs.runner import HEAVY

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload([*HEAVY, "google.cloud.storage", "s3fs", "aiobotocore"])


class Forked:
    """A running program; its output, both streams, goes to a file."""

    def __init__(
        self, folder: Path, module: str, *words: str | Path, env: Mapping[str, str] | None = None
    ) -> None:
        """Starts it; `folder` must be its own or that of programs that ended before."""
        folder.mkdir(parents=True, exist_ok=True)
        self._log = folder / f"{module}-{time.monotonic_ns()}.log"
        arguments = (module, [*map(str, words)], dict(env or os.environ), self._log)
        self._process = SERVER.Process(target=_program, args=arguments)
        self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    def output(self) -> str:
        """What it has said so far."""
        return self._log.read_text(errors="replace")

    def wait(self) -> int:
        """Its exit code, once it ended."""
        self._process.join()
        assert self._process.exitcode is not None
        return self._process.exitcode

    def wait_until_stopped(self) -> bool:
        """Whether SIGSTOP came before its end."""
        while self._process.is_alive():
            state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
            if state == "T":
                return True
            time.sleep(0.02)
        return False

    def kill(self) -> None:
        """Ends it, stopped or not."""
        self._process.kill()
        self._process.join()


def _program(module: str, words: list[str], environment: dict[str, str], log: Path) -> None:
    descriptor = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [module, *words]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
