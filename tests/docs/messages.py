"""Collects every text that the product shows to a user, from its syntax trees and templates.

    python -m tests.docs.messages [PACKAGE ...]

prints each text that is not plain: dialect, long sentences, and errors without an instruction.
"""

from __future__ import annotations

import ast
import copy
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.architecture.structure import LIBRARY, REPOSITORY, Module, modules
from tests.docs.plain_english import phrases, sentences

MOST_WORDS = 30
"""Longest sentence of a message."""
ERRORS = {
    node.name
    for node in ast.parse((LIBRARY / "errors.py").read_text(encoding="utf-8")).body
    if isinstance(node, ast.ClassDef)
} | {"ValueError"}
NO_INSTRUCTION: Mapping[str, str] = {
    "components/fedemb/foundation/canonical_json.py": "callers complete the sentence",
    "components/fedemb/foundation/document.py": "callers complete the sentence",
}
"""File -> why its errors do not say what to do."""
COMPLETED: Mapping[str, str] = {
    "components/fedemb/documents/": "`parse` of a document adds the instruction",
    "components/fedemb/training/server.py": "the reader of the state adds the instruction",
    "components/fedemb/keys/trust.py": "each is raised in a `try` that adds the instruction",
    "components/fedemb/ledger/terms.py": "each is raised in a `try` that adds the instruction",
}
"""Start of a path -> why a `ValueError` there does not say what to do."""
LOG_LEVELS = {"debug", "info", "warning", "error", "exception", "critical"}
HELP_CALLS = {"Option", "Argument", "Field", "Typer", "command"}
HELP_NAMES = {"help", "description", "epilog", "short_help"}
INSTRUCTION = re.compile(
    r"(?:^|X|[.;:,(] |\bor |\band |\bthen )(?:please |first )?"
    r"(add|allow|approve|ask|build|call|change|check|choose|clear|compile|connect|"
    r"convert|copy|correct|create|decrease|"
    r"define|delete|disable|do|drop|edit|embed|enable|evaluate|export|extend|fetch|find|fix|free|generate|give|grant|include|"
    r"increase|install|keep|leave|list|lower|make|mount|move|name|omit|open|partition|pass|pin|plan|point|pretrain|publish|put|"
    r"quote|raise|read|rebuild|recover|reduce|register|release|remove|rename|repair|repeat|replace|report|request|"
    r"reserve|resize|restore|resume|retry|rotate|run|save|see|select|send|set|sign|specify|split|start|"
    r"state|stop|submit|switch|take|train|try|tune|turn|update|upgrade|use|verify|wait|write)\b",
    re.IGNORECASE,
)
"""An imperative at the start of a clause: what to do."""


@dataclass(frozen=True)
class Message:
    """A text that a user may read.

    Attributes:
      kind: `error`, `part` (text that an error completes), `output`, `log`, `help` or `template`.
      path: of its file, relative to the repository.
      line: of its call.
      text: with `X` for each value that is filled in.
    """

    kind: str
    path: str
    line: int
    text: str

    @property
    def package(self) -> str:
        """Folder that is cleaned as one: a step, a package of `fedemb`, or one of `pipelines`."""
        parts = Path(self.path).parts
        deep = 3 if parts[:2] == ("components", "fedemb") else 2
        return "/".join(parts[: min(deep, len(parts) - 1)])


def problems(message: Message) -> list[str]:
    """Returns what is not plain about a message, with suggestions."""
    found: list[str] = []
    for sentence in sentences(message.text):
        found += [f"{hit!r} -> {suggestion}" for hit, suggestion in phrases(sentence)]
        count = len(re.findall(r"\w[\w'-]*", sentence))
        if count > MOST_WORDS:
            found.append(f"{count} words: split the sentence")
    told = message.kind != "error" or message.path in NO_INSTRUCTION
    if not told and not INSTRUCTION.search(message.text.strip()):
        found.append("does not say what to do")
    return found


def messages() -> list[Message]:
    """Returns all messages of the product, in order of files and lines."""
    found = [message for module in modules().values() for message in messages_of(module)]
    found += [message for path in sorted(LIBRARY.rglob("*.html")) for message in _template(path)]
    unique = {
        (message.kind, message.path, message.line, message.text): message for message in found
    }
    return list(unique.values())


def messages_of(module: Module, root: Path = REPOSITORY) -> Iterator[Message]:
    """Yields the messages of a module below a root."""
    path = module.path.resolve().relative_to(root).as_posix()
    completed = path.startswith(tuple(COMPLETED))
    for node in ast.walk(_Constants(module.tree).visit(copy.deepcopy(module.tree))):
        if isinstance(node, ast.Call):
            part = completed and _name(node) == "ValueError"
            for kind, text in _texts_of_call(node):
                if re.search(r"[A-Za-z]{2} ", text):
                    yield Message("part" if part else kind, path, node.lineno, text)


class _Constants(ast.NodeTransformer):
    """Replaces the names of a module's text constants with their text."""

    def __init__(self, tree: ast.Module):
        self._texts = {
            node.targets[0].id: node.value
            for node in tree.body
            if isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        }

    def visit_FormattedValue(self, node: ast.FormattedValue) -> ast.expr:
        """Replaces a constant inside an f-string."""
        name = node.value.id if isinstance(node.value, ast.Name) else ""
        return self._texts.get(name, node)

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """Replaces a constant elsewhere."""
        return self._texts.get(node.id, node) if isinstance(node.ctx, ast.Load) else node


def _name(node: ast.Call) -> str | None:
    name = node.func.attr if isinstance(node.func, ast.Attribute) else None
    return node.func.id if isinstance(node.func, ast.Name) else name


def _texts_of_call(node: ast.Call) -> Iterator[tuple[str, str]]:
    name = _name(node)
    if name in ERRORS:
        for text in _texts(node.args[0]) if node.args else ():
            yield "error", text
    elif name == "Reason" and len(node.args) == 3:
        for remedy in _texts(node.args[2]) or [""]:
            for text in _texts(node.args[1]) or ["X"]:
                whole = f"{text}. {remedy[:1].upper()}{remedy[1:]}"
                yield ("error", whole) if remedy else ("output", text)
    elif name in ("say", "prompt", "confirm", "asked"):
        for argument in node.args:
            yield from (("output", text) for text in _texts(argument))
    elif name in LOG_LEVELS and isinstance(node.func, ast.Attribute) and node.args:
        owner = ast.unparse(node.func.value)
        if "log" in owner.lower():
            yield from (("log", re.sub(r"%\S*[sdfgr]", "X", t)) for t in _texts(node.args[0]))
    elif name in HELP_CALLS:
        for keyword in node.keywords:
            if keyword.arg in HELP_NAMES:
                yield from (("help", text) for text in _texts(keyword.value))


def _texts(node: ast.expr) -> list[str]:
    """Returns the texts that an expression can have, with `X` for values."""
    if isinstance(node, ast.Constant):
        return [node.value] if isinstance(node.value, str) else []
    if isinstance(node, ast.JoinedStr):
        return ["".join(_part(part) for part in node.values)]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = _texts(node.left) or ["X"], _texts(node.right) or ["X"]
        return [one + other for one in left for other in right]
    if isinstance(node, ast.IfExp):
        return [*_texts(node.body), *_texts(node.orelse)]
    if isinstance(node, ast.BoolOp):
        return [text for value in node.values for text in _texts(value)]
    return []


def _part(part: ast.expr) -> str:
    return str(part.value) if isinstance(part, ast.Constant) else "X"


def _template(path: Path) -> Iterator[Message]:
    name = path.resolve().relative_to(REPOSITORY).as_posix()
    text = path.read_text(encoding="utf-8")
    hidden = r"<(style|script)\b.*?</\1>|\{#.*?#\}|\{%.*?%\}"
    for block in re.finditer(r"\{[{%](.*?)[}%]\}", text, re.DOTALL):
        for part in re.findall(r'"([^"]*[A-Za-z]{2} [A-Za-z][^"]*)"', block[1]):
            yield Message("template", name, text[: block.start()].count("\n") + 1, part)
    text = re.sub(hidden, lambda hit: "\n" * hit[0].count("\n"), text, flags=re.DOTALL)
    text = re.sub(r"\{\{.*?\}\}", "X", text, flags=re.DOTALL)
    inline = r"</?(a|b|i|em|strong|code|span|abbr|small|sub|sup)\b[^>]*>"
    text = re.sub(inline, "", text)
    text = re.sub(r"<[^>]*>", lambda hit: "\0" + "\n" * hit[0].count("\n"), text)
    line = 1
    for block in text.split("\0"):
        if re.search(r"[A-Za-z]{2} [A-Za-z]", block):
            yield Message("template", name, line, " ".join(block.split()))
        line += block.count("\n")


def main(packages: Sequence[str]) -> int:
    """Prints the messages that are not plain, of all packages or of those that are named."""
    count = 0
    for message in messages():
        if packages and not any(message.path.startswith(package) for package in packages):
            continue
        for problem in problems(message):
            count += 1
            print(f"{message.path}:{message.line}: {message.kind}: {problem}")  # noqa: T201
            print(f"    {message.text[:300]}")  # noqa: T201
    print(f"messages: {count} findings")  # noqa: T201
    return int(bool(count))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
