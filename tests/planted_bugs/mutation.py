"""Runs named tests on a copy of the product with one bug patched into it.

`python -m tests.planted_bugs.mutation [NAME...]` prints each bug, where it was put and which test
caught it; for the name `-` it takes names from its input until that ends. What takes long to import
is imported once; every bug gets a process forked from there, in which the package is that of the
copy.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import re
import shutil
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from tests.planted_bugs.edits import Edit, edited, path_of

REPOSITORY = Path(__file__).resolve().parents[2]
TREES = ("components", "pipelines", "requirements")
HEAVY = (
    "numpy",
    "scipy.stats",
    "pydantic",
    "cryptography.hazmat.primitives.ciphers",
    "hypothesis",
    "jaxtyping",
    "beartype",
    "dp_accounting.pld.pld_privacy_accountant",
    "h5py",
    "pyarrow.parquet",
    "tensorflow",
)
"""Others' packages that most tests import; never our own."""
_FAILED = re.compile(r"^FAILED (\S+)", re.MULTILINE)
"""Not `ERROR`: a test that could not start has caught nothing."""
_RED = 1
"""Exit code of pytest where a test failed; a bug that keeps tests from being collected has 2."""


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A bug as a patch: edits of product code, each anchored to a function and its syntax."""

    number: int
    """Its family in tests/planted_bugs/README.md."""
    name: str
    edits: tuple[Edit, ...]
    tests: tuple[str, ...]
    """Which must turn red, one at least."""

    @property
    def where(self) -> str:
        """Modules that are changed."""
        return ", ".join(dict.fromkeys(edit.module for edit in self.edits))


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a mutant."""

    caught_by: str | None
    seconds: float
    output: str


def planted(mutant: Mutant, folder: Path) -> Path:
    """Copies the product below a folder and patches the copy.

    Raises:
      ValueError: the code of an edit does not occur exactly once.
    """
    for tree in TREES:
        shutil.copytree(REPOSITORY / tree, folder / tree, symlinks=True)
    for module, source in patched(mutant).items():
        path_of(module, folder).write_text(source)
    return folder


def patched(mutant: Mutant) -> dict[str, str]:
    """Returns the patched source of each changed module, by its dotted name.

    Raises:
      ValueError: the code of an edit does not occur exactly once.
    """
    sources: dict[str, str] = {}
    for edit in mutant.edits:
        try:
            source = sources.get(edit.module) or path_of(edit.module, REPOSITORY).read_text()
            sources[edit.module] = edited(source, edit)
        except (OSError, ValueError) as error:
            raise ValueError(f"{mutant.name}: {error}. Write the bug for the new code") from error
    return sources


def outcome(mutant: Mutant) -> Outcome:
    """Plants a bug and runs its tests in a process forked from this one."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        copy, log = planted(mutant, Path(folder)), Path(folder) / "log"
        child = os.fork()
        if child == 0:
            _run_tests(copy, log, mutant.tests)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        text = log.read_text(errors="replace")
    found = _FAILED.search(text) if code == _RED else None
    if not mutant.edits and code == 0:
        return Outcome("nothing", time.monotonic() - started, text[-3000:])
    return Outcome(found[1] if found else None, time.monotonic() - started, text[-3000:])


def _run_tests(copy: Path, log: Path, tests: tuple[str, ...]) -> None:
    code = 70
    try:
        output = os.open(log, os.O_CREAT | os.O_WRONLY)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.environ["PYTHONPATH"] = str(copy / "components")  # of what the tests start
        sys.path.insert(0, os.environ["PYTHONPATH"])
        import pytest

        import fedemb

        if Path(fedemb.__file__).is_relative_to(copy):
            options = ["-q", "-x", "-p", "no:cacheprovider", "--no-header", "--tb=line"]
            code = int(pytest.main([*options, *tests]))
    finally:
        sys.stdout.flush()
        os._exit(code)


def main(names: list[str]) -> None:
    """Prints one line of JSON for each mutant."""
    from tests.planted_bugs.mutants import MUTANTS

    os.chdir(REPOSITORY)
    for name in HEAVY:
        with suppress(ImportError):
            importlib.import_module(name)
    if any(name.split(".")[0] == "fedemb" for name in sys.modules):
        raise SystemExit("the package was imported before any bug was planted")
    known = {mutant.name: mutant for mutant in MUTANTS}
    for name in map(str.strip, sys.stdin) if names == ["-"] else names or known:
        found = outcome(known[name])
        line = {"name": name, "where": known[name].where, **dataclasses.asdict(found)}
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
