"""Digests of the code that ran: sources, locked dependencies and the user's own code."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from fedemb.config import RunConfig
from fedemb.errors import ConfigError
from fedemb.foundation.canonical_json import file_digest, json_digest

ROOT = Path(__file__).parents[1]
LOCKS = ("cpu", "dev", "gpu", "light", "tpu")
"""Lock files of the image flavours and of a checkout; every image of a build contains all."""
DECIDES_PRIVACY = (
    "config",
    "data",
    "foundation",
    "keys",
    "ledger",
    "models",
    "partition",
    "privacy",
    "steps/partition_users.py",
    "steps/reserve_budget.py",
    "steps/train_model.py",
    "storage",
    "training",
)
"""Packages and modules that sample, clip, add noise, account, reserve, commit rounds, assign users
to virtual clients, or set the numeric precision."""


def code_digest(config: RunConfig | None = None) -> str:
    """Returns the SHA-256 of the code that a reservation binds, 64 hexadecimal digits.

    The digest covers the privacy-relevant code and the locks. With a configuration, it also covers
    the code that the configuration names as `module:function`. Resuming an attempt with different
    code is refused. Report pages, evaluations and docstrings may change during a run.

    Raises:
      ConfigError: the configuration names a module that is not installed.
    """
    backbone = config.model.backbone if config is not None else ""
    if ":" not in backbone:
        return privacy_code_digest()
    return json_digest({"own": privacy_code_digest(), "user": _user_digest(backbone)})


@cache
def privacy_code_digest() -> str:
    """Returns the SHA-256 of the privacy-relevant code and the locks, 64 hexadecimal digits.

    Comments, docstrings and layout are ignored: each source is hashed as its syntax tree.
    """
    sources = [path for package in DECIDES_PRIVACY for path in _below(ROOT / package)]
    digests = {
        path.relative_to(ROOT).as_posix(): _tree_digest(path.read_bytes()) for path in sources
    }
    locks = (f"requirements/{name}" for name in LOCKS)
    return json_digest({**{name: file_digest(ROOT / f"{name}.txt") for name in locks}, **digests})


@cache
def _user_digest(reference: str) -> dict[str, str]:
    """Returns digests of the user's module, or of the package that contains it."""
    package = reference.partition(":")[0].partition(".")[0]
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    if spec is None:
        raise ConfigError(
            f"model.backbone={reference!r} names the module {package!r}, which is not installed "
            "here; install it wherever a step of the run takes place: its code is bound before "
            "anything is charged"
        )
    folders = spec.submodule_search_locations
    if folders is None:
        return {package: file_digest(Path(str(spec.origin)))}
    return {
        path.relative_to(folder).as_posix(): file_digest(path)
        for folder in folders
        for path in _below(Path(folder))
    }


def _below(folder: Path) -> Iterator[Path]:
    """Yields a source, or the sources below a folder, in order; follows links to folders."""
    found = [folder] if folder.is_file() else list[Path]()
    for place, _, names in os.walk(folder, followlinks=True):
        found += [Path(place, name) for name in names if name.endswith(".py")]
    yield from sorted(found)


@cache
def _tree_digest(source: bytes) -> str:
    tree = ast.parse(source)
    for node in ast.walk(tree):
        for field in ("body", "orelse", "finalbody"):
            block = getattr(node, field, None)
            if isinstance(block, list):
                setattr(node, field, [item for item in block if not _is_text(item)])
        if not vars(node).get("type_params", True):  # unknown field in Python 3.11
            del vars(node)["type_params"]
    # Later versions omit empty fields unless requested:
    whole: dict[str, Any] = {"show_empty": True} if sys.version_info >= (3, 13) else {}
    return hashlib.sha256(ast.dump(tree, **whole).encode()).hexdigest()


def _is_text(statement: ast.AST) -> bool:
    """Returns whether a statement is only a string, such as a docstring, and has no effect."""
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )
