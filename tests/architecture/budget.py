"""The size of the project: code lines of each subpackage, commands, settings, documents, words.

    python -m tests.architecture.budget            prints what is measured
    python -m tests.architecture.budget --lower    lowers the limits in budget.toml to it

`test_budget.py` compares the measures with the limits in `budget.toml`. A limit may only fall. A
raised limit needs a comment in the same line that says what the lines buy.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
import tomllib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIMITS = Path(__file__).parent / "budget.toml"
PRODUCT = ("components", "pipelines")
LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
"""Tokens that are not code."""


def code_lines(source: bytes) -> int:
    """Returns the lines of a Python file without blank lines, comments and docstrings."""
    texts = set[int]()
    for node in ast.walk(ast.parse(source)):
        value = node.value if isinstance(node, ast.Expr) else None
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            texts.update(range(value.lineno, (value.end_lineno or value.lineno) + 1))
    used = set[int]()
    for token in tokenize.tokenize(io.BytesIO(source).readline):
        if token.type not in LAYOUT:
            used.update(range(token.start[0], token.end[0] + 1))
    return len(used - texts)


def subpackage_of(path: str) -> str:
    """Returns the subpackage of a file below `components/fedemb`, or its folder."""
    parts = path.split("/")[:-1]
    return "/".join(parts[: 3 if parts[:2] == ["components", "fedemb"] else 2])


def measure() -> dict[str, int]:
    """Returns each measured quantity by its name in `budget.toml`."""
    from fedemb.config.run import mechanism_sections
    from tests.docs.test_docs import pages, words_of

    listed = subprocess.run(
        ["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    lines, files = Counter[str](), 0
    for name in listed.stdout.split():
        path, top = ROOT / name, name.split("/")[0]
        if top not in (*PRODUCT, "tests", "studies") or not path.is_file() or path.is_symlink():
            continue
        lines[subpackage_of(name) if top in PRODUCT else top] += code_lines(path.read_bytes())
        files += top in PRODUCT
    reference = ROOT / "docs" / "reference"
    prose = [page for page in pages() if not page.startswith(("studies/", "tests/", "infra/"))]
    return {
        "product lines": sum(n for part, n in lines.items() if part.startswith(PRODUCT)),
        "test lines": lines["tests"],
        "product files": files,
        "commands": _starts(reference / "cli.md", "## fedemb "),
        "settings": _starts(reference / "configuration.md", "| `"),
        "kinds of documents": _starts(reference / "documents.md", "## "),
        "mechanisms": len(mechanism_sections()),
        "words in pages": sum(map(words_of, prose)),
        **{f"lines of {part}": n for part, n in sorted(lines.items()) if n and part != "tests"},
    }


def limits(text: str) -> dict[str, int]:
    """Returns name -> limit."""
    return tomllib.loads(text)


def raised_without_reason(older: str, newer: str) -> list[str]:
    """Returns the names whose limit grew between two versions of `budget.toml`, unexplained."""
    before, after = limits(older), limits(newer)
    explained = {
        match[1] for line in newer.splitlines() if (match := re.match(r'"(.+?)" = \d+  # \w', line))
    }
    return sorted(
        name for name, n in after.items() if n > before.get(name, 0) and name not in explained
    )


def lowered(text: str, measured: Mapping[str, int]) -> str:
    """Returns the table with each limit lowered to its measure, without names that are gone."""
    kept = []
    for line in text.splitlines():
        match = re.match(r'"(.+?)" = (\d+)(.*)', line)
        if match and match[1] not in measured:
            continue
        if match and measured[match[1]] < int(match[2]):
            line = f'"{match[1]}" = {measured[match[1]]}{match[3]}'  # noqa: PLW2901
        kept.append(line)
    return "\n".join(kept) + "\n"


def _starts(page: Path, start: str) -> int:
    return sum(line.startswith(start) for line in page.read_text().splitlines())


if __name__ == "__main__":
    found = measure()
    if "--lower" in sys.argv:
        LIMITS.write_text(lowered(LIMITS.read_text(), found))
    for name, count in found.items():
        sys.stdout.write(f'"{name}" = {count}\n')
