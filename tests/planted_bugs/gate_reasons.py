"""Reason codes of the gate as its source has them, and the tests that name each.

Both are read from the syntax tree, so a new code without a test is found.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "components"
TESTS = ROOT / "tests" / "components" / "gate"
EVERY_RULE = "test_rule_that_breaks_denies"
"""Takes its cases from `RULES`, so it names the code of each rule that cannot be evaluated."""


@dataclass(frozen=True)
class Site:
    """A construction of a `Reason`."""

    module: str
    """Dotted name."""
    function: str
    codes: tuple[str, ...]
    """More than one where a loop gives them."""
    statement: str
    """Source of the statement around it."""
    fallback: bool
    """Returns whether it is in an exception handler: the rule could not be evaluated."""


def sites() -> Iterator[Site]:
    """Every construction of a `Reason` in the package.

    Raises:
      ValueError: a code is neither a text nor a name whose values can be read from the source.
    """
    for path in sorted({*PACKAGE.glob("fedemb/**/*.py"), *PACKAGE.glob("*/*.py")}):
        text = path.read_text()
        if "Reason(" not in text:
            continue
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        module = ".".join(parts if parts[0] == "fedemb" else ("fedemb", "steps", *parts))
        tree = ast.parse(text)
        for function in ast.walk(tree):
            if isinstance(function, ast.FunctionDef):
                yield from _sites_of(module, function, tree)


def _sites_of(module: str, function: ast.FunctionDef, tree: ast.Module) -> Iterator[Site]:
    handled = {
        id(node)
        for handler in ast.walk(function)
        if isinstance(handler, ast.ExceptHandler)
        for node in ast.walk(handler)
    }
    for statement in ast.walk(function):
        if not isinstance(statement, ast.Expr | ast.Assign | ast.Return):
            continue
        for call in ast.walk(statement):
            if (
                isinstance(call, ast.Call)
                and isinstance(call.func, ast.Name)
                and call.func.id == "Reason"
            ):
                codes = tuple(dict.fromkeys(_codes(call.args[0], function, tree)))
                if not codes:
                    raise ValueError(f"{module}.{function.name}: write the code as a text")
                source = ast.unparse(statement)
                fallback = id(call) in handled and isinstance(call.args[0], ast.Constant) is False
                yield Site(module, function.name, codes, source, fallback)


def _codes(code: ast.expr, function: ast.FunctionDef, tree: ast.Module) -> Iterator[str]:
    if isinstance(code, ast.Constant) and isinstance(code.value, str):
        yield code.value
        return
    assert isinstance(code, ast.Name)
    for node in ast.walk(function):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                yield from _assigned(code.id, target, node.value)
        elif isinstance(node, ast.For) and code.id in _names(node.target):
            yield from _looped(node.iter, tree)


def _assigned(name: str, target: ast.expr, value: ast.expr) -> Iterator[str]:
    pairs = [(target, value)]
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        pairs = list(zip(target.elts, value.elts, strict=True))
    for where, what in pairs:
        if isinstance(where, ast.Name) and where.id == name and isinstance(what, ast.Constant):
            yield str(what.value)


def _looped(iterated: ast.expr, tree: ast.Module) -> Iterator[str]:
    """Codes of a loop over a table of this module, or over what evidence says has failed."""
    names = _names(iterated)
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and names & _names(node.target) and node.value:
            yield from (row.elts[0].value for row in node.value.elts)  # pyright: ignore
    if any(
        isinstance(node, ast.Attribute) and node.attr == "failed" for node in ast.walk(iterated)
    ):
        (path,) = PACKAGE.glob("fedemb/**/mechanism_audit.py")
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name == "failed":
                yield from _keys_set(node)


def _keys_set(function: ast.FunctionDef) -> Iterator[str]:
    for node in ast.walk(function):
        keys = node.keys if isinstance(node, ast.Dict) else []
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            keys = [node.slice]
        yield from (key.value for key in keys if isinstance(key, ast.Constant))


def _names(node: ast.AST) -> set[str]:
    return {item.id for item in ast.walk(node) if isinstance(item, ast.Name)}


def reason_codes() -> set[str]:
    """Every code that the gate may give."""
    return {code for site in sites() for code in site.codes}


def named_codes() -> dict[str, tuple[str, ...]]:
    """Of each text that a test of the gate names, the tests, as pytest selects them."""
    found: dict[str, list[str]] = {}
    for path in sorted(TESTS.glob("test_*.py")):
        for function in ast.parse(path.read_text()).body:
            if isinstance(function, ast.FunctionDef) and function.name.startswith("test_"):
                test = f"{path.relative_to(ROOT)}::{function.name}"
                texts = {
                    node.value for node in ast.walk(function) if isinstance(node, ast.Constant)
                }
                if function.name == EVERY_RULE:
                    texts |= {code for site in sites() if site.fallback for code in site.codes}
                for text in texts:
                    if isinstance(text, str):
                        found.setdefault(text, []).append(test)
    return {text: tuple(dict.fromkeys(tests)) for text, tests in found.items()}
