"""Plants bugs into a copy of the product and runs tests on it: the only runner of mutants.

`mutants.toml` lists the bugs; one more is each rule of the gate, left out. An edit names a module,
a function and an expression or some statements of it by their syntax, so it outlives formatting and
moves within a module.

`python -m tests.planted_bugs.runner [NAME...]` prints each bug, where it was put and which test
caught it; for the name `-` it takes names from its input until that ends. What takes long to import
is imported once; every bug gets a process forked from there, in which the package is that of the
copy.
"""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import resource
import shutil
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).resolve().parents[2]
TREES = ("components", "pipelines", "requirements")
TABLE = Path(__file__).with_name("mutants.toml")
HEAVY = (
    *("numpy", "scipy.stats", "pydantic", "cryptography.hazmat.primitives.ciphers", "hypothesis"),
    *("jaxtyping", "beartype", "dp_accounting.pld.pld_privacy_accountant", "h5py"),
    *("pyarrow.parquet", "tensorflow"),
)
"""Others' packages that most tests import; never our own."""
CHARGE = tuple(f"tests/components/gate/test_gate_{it}.py" for it in ("before_charge", "rules"))
"""They reserve what the gate would deny."""
RED = 1
"""Exit code of pytest where a test failed; a bug that keeps tests from being collected has 2."""


class Edit(NamedTuple):
    """Code of a function, and what a careless developer writes instead."""

    module: str
    """Dotted name."""
    function: str
    """Name of the function or class, with its class or outer function in front of a dot where the
    name is not unique in the module; empty: the whole module."""
    old: str
    """An expression or consecutive statements that occur there exactly once."""
    new: str
    """What takes their place; empty deletes statements."""


class Mutant(NamedTuple):
    """A bug as a patch."""

    number: int
    """Its family in tests/planted_bugs/README.md."""
    name: str
    edits: tuple[Edit, ...]
    tests: tuple[str, ...]
    """Which must turn red, one at least."""


SOUND = Mutant(1, "nothing_planted", (), ("tests/planted_bugs/test_layers.py",))


class Outcome(NamedTuple):
    """What tests said of a copy."""

    code: int
    """Of pytest; minus the signal that ended it."""
    caught_by: str | None
    """The first test that failed. Not one that could not start: it has caught nothing."""
    seconds: float
    output: str


# The table


def mutants() -> list[Mutant]:
    """All bugs, the first without any: a copy that must be green."""
    table = tomllib.loads(TABLE.read_text())
    return [SOUND, *map(_of_row, table.items()), *_gate()]


def _of_row(row: tuple[str, Mapping]) -> Mutant:
    name, fields = row
    edits = []
    for edit in (fields, *fields.get("also", ())):
        module, _, function = edit["in"].partition(" ")
        edits.append(Edit(module, function, edit["old"], edit["new"]))
    return Mutant(fields["bug"], name, tuple(edits), tuple(f"tests/{it}" for it in fields["red"]))


def named_codes() -> dict[str, tuple[str, ...]]:
    """Of each text that a test of the gate names, the tests, as pytest selects them."""
    found: dict[str, dict[str, None]] = {}
    for path in sorted((REPOSITORY / "tests/components/gate").glob("test_*.py")):
        for function in ast.parse(path.read_text()).body:
            if isinstance(function, ast.FunctionDef) and function.name.startswith("test_"):
                for node in ast.walk(function):
                    if isinstance(node, ast.Constant) and isinstance(node.value, str):
                        test = f"{path.relative_to(REPOSITORY)}::{function.name}"
                        found.setdefault(node.value, {})[test] = None
    return {text: tuple(tests) for text, tests in found.items()}


def _gate() -> Iterator[Mutant]:
    """Yields a bug for each rule of the gate, and one for each rule before the charge.

    The rules are read from the source: planting needs a process that imported none of them.
    """
    tests = named_codes()
    for path in sorted((REPOSITORY / "components/fedemb/release").glob("*_rules.py")):
        for rule in ast.parse(path.read_text()).body:
            if not isinstance(rule, ast.FunctionDef) or not rule.decorator_list:
                continue
            declared = ast.unparse(rule.decorator_list[0])
            edit = Edit(f"fedemb.release.{path.stem}", rule.name, declared, "staticmethod")
            yield Mutant(19, f"gate_without_{rule.name}", (edit,), tests.get(rule.name, ()))
            if declared.endswith(".before_charge"):
                left = f"(rule for rule in RULES if rule.code != {rule.name!r})"
                edit = Edit("fedemb.release.decide", "check_before_charge", "RULES", left)
                yield Mutant(19, f"charged_without_{rule.name}", (edit,), CHARGE)


# Patches


def patched(mutant: Mutant) -> dict[str, str]:
    """Returns the patched source of each changed file, by its path in the repository.

    Raises:
      ValueError: the code of an edit does not occur exactly once.
    """
    sources: dict[str, str] = {}
    for edit in mutant.edits:
        path = REPOSITORY / "components" / f"{edit.module.replace('.', '/')}.py"
        try:
            file = str(path.resolve(strict=True).relative_to(REPOSITORY))
            sources[file] = edited(sources.get(file) or path.read_text(), edit)
        except (OSError, ValueError) as error:
            raise ValueError(f"{mutant.name}: {error}. Write the bug for the new code") from error
    return sources


def edited(source: str, edit: Edit) -> str:
    """Applies an edit to the source of its module.

    Raises:
      ValueError: function or code does not occur exactly once.
    """
    tree = ast.parse(source)
    scopes = [node for name, node in _scopes(tree) if f".{name}".endswith(f".{edit.function}")]
    if edit.function == "":
        scopes = [tree]
    if len(scopes) != 1:
        raise ValueError(f"{len(scopes)} functions {edit.function!r} in {edit.module}, expected 1")
    old, new = ast.parse(edit.old).body, ast.parse(edit.new).body
    if all(len(body) == 1 and isinstance(body[0], ast.Expr) for body in (old, new)):
        places = _replaced_expressions(scopes[0], old[0].value, new[0].value)
    else:
        places = _replaced_statements(scopes[0], old, new)
    if places != 1:
        raise ValueError(
            f"{edit.old!r} occurs {places} times in {edit.function or 'the module'} of "
            f"{edit.module}, expected 1"
        )
    return ast.unparse(ast.fix_missing_locations(tree)) + "\n"


def _scopes(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Functions and classes with their qualified names."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{prefix}.{child.name}".lstrip(".")
            yield name, child
            yield from _scopes(child, name)
        else:
            yield from _scopes(child, prefix)


def _replaced_expressions(scope: ast.AST, old: ast.expr, new: ast.expr) -> int:
    """Replaces each expression equal to `old` by `new`, and counts them."""
    wanted, found = ast.dump(old), 0
    for parent in list(ast.walk(scope)):
        for name, value in ast.iter_fields(parent):
            if isinstance(value, list):
                for index, item in enumerate(value):
                    if isinstance(item, ast.expr) and ast.dump(item) == wanted:
                        value[index] = new
                        found += 1
            elif isinstance(value, ast.expr) and ast.dump(value) == wanted:
                setattr(parent, name, new)
                found += 1
    return found


def _replaced_statements(scope: ast.AST, old: list[ast.stmt], new: list[ast.stmt]) -> int:
    """The same for a run of statements."""
    wanted, found = [ast.dump(statement) for statement in old], 0
    for parent in list(ast.walk(scope)):
        for name in ("body", "orelse", "finalbody"):
            block = getattr(parent, name, None)
            if not isinstance(block, list):
                continue
            dumps = [ast.dump(statement) for statement in block]
            for start in range(len(block) - len(wanted) + 1):
                if dumps[start : start + len(wanted)] == wanted:
                    block[start : start + len(wanted)] = new
                    found += 1
            if not block and name == "body":
                block.append(ast.Pass())
    return found


# Runs


def planted(sources: Mapping[str, str], folder: Path) -> Path:
    """Copies the product below a folder and puts changed files into the copy."""
    for tree in TREES:
        shutil.copytree(REPOSITORY / tree, folder / tree, symlinks=True)
    for file, source in sources.items():
        (folder / file).write_text(source)
    return folder


def load() -> None:
    """Imports what takes long; the copy's package must still be the first of its name."""
    os.chdir(REPOSITORY)
    for name in HEAVY:
        with suppress(ImportError):
            importlib.import_module(name)
    if any(name.split(".")[0] == "fedemb" for name in sys.modules):
        raise SystemExit("the package was imported before any bug was planted")


def tried(sources: Mapping[str, str], tests: tuple[str, ...], seconds: float = 3600) -> Outcome:
    """Runs tests on a copy with changed files, in a process forked from this one.

    Args:
      sources: text of files, by their path in the repository.
      tests: as pytest selects them; it stops at the first failure.
      seconds: processor seconds after which it is killed.
    """
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        copy, log = planted(sources, Path(folder)), Path(folder) / "log"
        child = os.fork()
        if child == 0:
            resource.setrlimit(resource.RLIMIT_CPU, (int(seconds) + 1,) * 2)
            _run_tests(copy, log, tests)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        text = log.read_text(errors="replace")
    found = re.search(r"^FAILED (\S+)", text, re.MULTILINE) if code == RED else None
    return Outcome(code, found and found[1], time.monotonic() - started, text[-3000:])


def _run_tests(copy: Path, log: Path, tests: tuple[str, ...]) -> None:
    """Never returns: the exit code is that of pytest."""
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
    load()
    known = {mutant.name: mutant for mutant in mutants()}
    for name in map(str.strip, sys.stdin) if names == ["-"] else names or known:
        sources = patched(known[name])
        line = {"name": name, "where": list(sources), **tried(sources, known[name].tests)._asdict()}
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
