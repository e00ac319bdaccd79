"""Edits of source that are anchored to its syntax, so that they outlive formatting and moves.

An `Edit` names a module, a function and an expression or some statements of it. Code that is
formatted in another way still matches, and so does a function that moved within its module. A
module that moves is one line of `mutants/places.py`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


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


def path_of(module: str, root: Path) -> Path:
    """The file of a module below a copy of the repository."""
    path = root / "components" / f"{module.replace('.', '/')}.py"
    return path.resolve() if path.exists() else path


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
    expressions = _expression(old), _expression(new)
    if all(expressions):
        places = _replaced_expressions(scopes[0], *expressions)
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


def _expression(body: list[ast.stmt]) -> ast.expr | None:
    return body[0].value if len(body) == 1 and isinstance(body[0], ast.Expr) else None


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
