"""Lists what Cosmic Ray would change in given modules, as JSON lines.

    python tests/mutation/mutants.py FILE... > build/mutants.jsonl

Runs in an environment of its own, which has Cosmic Ray and not the project. Of the replacements
that Cosmic Ray has for one operator at one position (eleven for `+`), one or two of its family are
chosen by a digest. Changes of annotations are left out: nothing runs them.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from cosmic_ray.ast import ast_nodes, get_ast_from_path
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

_KIND = re.compile(r"Replace(Binary|Comparison)Operator_(\w+)_(\w+)")
_CHOSEN = {"Binary": 1, "Comparison": 2}
"""How many replacements of one operator at one position are tried."""
_FAMILIES = (
    {"Add", "Sub", "Mul", "Div", "FloorDiv", "Mod", "Pow"},
    {"RShift", "LShift", "BitOr", "BitAnd", "BitXor"},
    {"Eq", "NotEq", "Lt", "LtE", "Gt", "GtE"},
    {"Is", "IsNot"},
)
"""Replacements across families mostly raise a TypeError, which any test notices."""
_LEFT_OUT = {"core/VariableReplacer", "core/VariableInserter"}
"""They need names as arguments."""


def mutants_of(path: Path) -> Iterator[dict[str, object]]:
    """Every mutant of a file: operator, position, and the text that changes."""
    source = path.read_text()
    plain = _without_annotations(source)
    tree, by_site = get_ast_from_path(path), dict[tuple[object, ...], list[tuple[str, int, int]]]()
    for name in operator_names():
        kind = _KIND.search(name)
        same = kind is None or any({kind[2], kind[3]} <= family for family in _FAMILIES)
        if name in _LEFT_OUT or not same:
            continue
        operator = get_operator(name)()
        positions = (at for node in ast_nodes(tree) for at in operator.mutation_positions(node))
        for occurrence, (start, _) in enumerate(positions):
            site = (kind[1], *start) if kind else (name, *start, occurrence)
            by_site.setdefault(site, []).append((name, occurrence, start[0]))
    for site, found in by_site.items():
        first = hashlib.sha256(repr((path.name, site)).encode()).digest()[0] % len(found)
        chosen = 0
        for name, occurrence, line in found[first:] + found[:first]:
            mutated = _mutated(source, name, occurrence)
            if mutated is None or _without_annotations(mutated) in (plain, None):
                continue
            begin, old, new = _change(source, mutated)
            yield {
                "file": str(path),
                "operator": name.removeprefix("core/"),
                "occurrence": occurrence,
                "line": line,
                "begin": begin,
                "old": old,
                "new": new,
            }
            chosen += 1
            if chosen == _CHOSEN.get(str(site[0]), 1):
                break


def _mutated(source: str, operator: str, occurrence: int) -> str | None:
    """The changed source; None where the operator cannot change it."""
    try:
        return mutate_code(source, get_operator(operator)(), occurrence)
    except AttributeError:  # ExceptionReplacer on a dotted name
        return None


def _change(source: str, mutated: str) -> tuple[int, str, str]:
    """Offset of the first character that differs, and the text there before and after."""
    short = min(len(source), len(mutated))
    begin = next((i for i in range(short) if source[i] != mutated[i]), short)
    end = 0
    while end < short - begin and source[-1 - end] == mutated[-1 - end]:
        end += 1
    return begin, source[begin : len(source) - end], mutated[begin : len(mutated) - end]


def _without_annotations(source: str) -> str | None:
    """What runs of a module; None where it does not compile."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.returns = None
        elif isinstance(node, ast.arg):
            node.annotation = None
        elif isinstance(node, ast.AnnAssign):
            node.annotation = ast.Constant(None)
    return ast.dump(tree)


def main(paths: list[str]) -> None:
    """Prints the mutants of all files."""
    for name in paths:
        for mutant in mutants_of(Path(name)):
            sys.stdout.write(json.dumps(mutant) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
