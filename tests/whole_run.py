"""`fedemb run` as a user types it, in a process of its own."""

import subprocess
import sys
from pathlib import Path


def fedemb(*words: str) -> list[str]:
    """A command line."""
    return [sys.executable, "-m", "fedemb", *words]


def run_command(runs: Path, *extra: str, overrides: list[str]) -> list[str]:
    """`fedemb run` with `--set` for each override."""
    settings = [part for item in overrides for part in ("--set", item)]
    return fedemb("run", "--runs", str(runs), *settings, *extra)


def finish(command: list[str]) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end, ten minutes at most."""
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)


def closing_line(output: str, name: str) -> str:
    """What follows `name: ` in the one line that begins so."""
    found = [text for text in output.splitlines() if text.startswith(f"{name}: ")]
    assert len(found) == 1, output
    return found[0].split(": ", 1)[1]
