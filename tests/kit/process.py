"""Python in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path


def python(*words: object, env: dict[str, str] | None = None, timeout: float = 900) -> str:
    """Runs Python in the repository; returns its output, or fails with what it said.

    Args:
      *words: its arguments.
      env: added to the environment.
      timeout: seconds until it is killed.
    """
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=Path(__file__).parents[2],
        env=os.environ | (env or {}),
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
