"""Runs tests in a process that imports the product again, with one changed file.

Code outside of functions (a constant, a decorator, a default) runs while its module is imported. A
process that has imported the dependencies of the product, and no module of it, waits for such
mutants. For each it forks a child, which imports the product with the changed text of one file.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from importlib.machinery import SourceFileLoader
from types import CodeType
from typing import cast

from tests.mutation.changes import Mutant
from tests.mutation.children import in_child, quiet

FOUNDATIONS = (
    *("tensorflow", "keras", "numpy", "scipy.stats", "dp_accounting", "pydantic", "hypothesis"),
    *("cryptography", "pyarrow.parquet", "PIL.Image", "jaxtyping", "apache_beam", "kfp"),
)
"""What takes long to import and is not changed."""


class Fresh:
    """The process that waits."""

    def __init__(self) -> None:
        """Starts the process; to be called before anything of the product is imported."""
        mine, its = os.pipe(), os.pipe()
        self.child = os.fork()
        if self.child == 0:
            os.close(mine[1])
            os.close(its[0])
            _serve(mine[0], its[1])
        os.close(mine[0])
        os.close(its[1])
        self._asks = os.fdopen(mine[1], "w")
        self._answers = os.fdopen(its[0])

    def run(self, mutant: Mutant, tests: list[str], log: str, seconds: float) -> int | None:
        """The exit code of pytest; None where it was stopped for taking too long."""
        asked = {"mutant": vars(mutant), "tests": tests, "log": log, "seconds": seconds}
        self._asks.write(json.dumps(asked) + "\n")
        self._asks.flush()
        return cast("int | None", json.loads(self._answers.readline()))

    def close(self) -> None:
        """Ends the process."""
        self._asks.close()
        os.waitpid(self.child, 0)


def _serve(asks: int, answers: int) -> None:
    os.environ.setdefault("TF_NUM_INTRAOP_THREADS", "1")
    with os.fdopen(asks) as lines, os.fdopen(answers, "w") as out:
        for line in lines:
            for name in FOUNDATIONS:  # at the first mutant: most groups have few
                importlib.import_module(name)
            asked = json.loads(line)
            mutant = Mutant(**asked["mutant"])
            code = in_child(
                lambda mutant=mutant, asked=asked: _run(mutant, asked["tests"], asked["log"]),
                asked["seconds"],
            )
            out.write(json.dumps(code) + "\n")
            out.flush()
    os._exit(0)


def _run(mutant: Mutant, tests: list[str], log: str) -> None:
    """Never returns: the exit code is that of pytest."""
    code = 70
    try:
        quiet(log)
        import_changed(mutant)
        import pytest

        options = ["-q", "-x", "-p", "no:cacheprovider", "--no-header", "--tb=line"]
        code = int(pytest.main([*options, *tests]))
    finally:
        sys.stdout.flush()
        os._exit(code)


def import_changed(mutant: Mutant) -> None:
    """From here on, importing the file of a mutant runs its changed text."""
    path, source = os.path.realpath(mutant.path), mutant.source()
    plain = SourceFileLoader.get_code

    def get_code(self: SourceFileLoader, fullname: str) -> CodeType | None:
        found = self.get_filename(fullname)
        if os.path.realpath(found) == path:
            return compile(source, found, "exec", dont_inherit=True)
        return plain(self, fullname)

    SourceFileLoader.get_code = get_code
