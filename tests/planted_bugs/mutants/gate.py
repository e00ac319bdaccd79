"""Every rule of the gate removed in turn: the tests that name its code must notice."""

from __future__ import annotations

import ast

from fedemb.gate.decide import RULES
from tests.planted_bugs.edits import Edit
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


def _without(code: str) -> str:
    return f"(rule for rule in RULES if rule.code != {code!r})"


def _without_each_rule() -> tuple[Mutant, ...]:
    """One bug for each rule of the gate, and one for each rule before the charge."""
    tests, found = named_codes(), list[Mutant]()
    for rule in RULES:
        edit = Edit(modules.DECIDE, "decide", "RULES", _without(rule.code))
        found.append(Mutant(19, f"gate_without_{rule.code}", (edit,), tests.get(rule.code, ())))
        if rule.before is not None:
            edit = Edit(modules.DECIDE, "check_before_charge", "RULES", _without(rule.code))
            found.append(Mutant(19, f"charged_without_{rule.code}", (edit,), (CHARGE,)))
    return tuple(found)


MUTANTS = _without_each_rule()
