"""Every rule of the gate removed in turn: the tests that name its code must notice."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.planted_bugs.edits import Edit, path_of
from tests.planted_bugs.mutants import modules
from tests.planted_bugs.mutation import REPOSITORY, Mutant

TESTS = REPOSITORY / "tests" / "components" / "gate"
CHARGE = "tests/components/gate/test_gate_before_charge.py"


def named_codes() -> dict[str, tuple[str, ...]]:
    """Of each text that a test of the gate names, the tests, as pytest selects them."""
    found: dict[str, list[str]] = {}
    for path in sorted(TESTS.glob("test_*.py")):
        for function in ast.parse(path.read_text()).body:
            if isinstance(function, ast.FunctionDef) and function.name.startswith("test_"):
                test = f"{path.relative_to(REPOSITORY)}::{function.name}"
                for node in ast.walk(function):
                    if isinstance(node, ast.Constant) and isinstance(node.value, str):
                        found.setdefault(node.value, []).append(test)
    return {text: tuple(dict.fromkeys(tests)) for text, tests in found.items()}


def _without_each_rule() -> Iterator[Mutant]:
    """Yields a bug for each rule of the gate, and one for each rule before the charge.

    The rules are read from the source: planting needs a process that imported none of them.
    """
    tests = named_codes()
    for path in sorted(path_of(modules.DECIDE, REPOSITORY).parent.glob("*_rules.py")):
        for rule in ast.parse(path.read_text()).body:
            if not isinstance(rule, ast.FunctionDef) or not rule.decorator_list:
                continue
            declared = ast.unparse(rule.decorator_list[0])
            edit = Edit(f"fedemb.gate.{path.stem}", rule.name, declared, "staticmethod")
            yield Mutant(19, f"gate_without_{rule.name}", (edit,), tests.get(rule.name, ()))
            if declared.endswith(".before_charge"):
                left = f"(rule for rule in RULES if rule.code != {rule.name!r})"
                edit = Edit(modules.DECIDE, "check_before_charge", "RULES", left)
                yield Mutant(19, f"charged_without_{rule.name}", (edit,), (CHARGE,))


MUTANTS = tuple(_without_each_rule())
