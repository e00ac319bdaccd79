"""What code ran: one digest over the sources of this package."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import components
from components.fedemb.artifacts import file_digest, json_digest
from components.fedemb.config import RunConfig


@cache
def code_digest() -> str:
    """SHA-256 over names and contents of all sources below `components/`, 64 hexadecimal digits.

    Part of what a reservation binds: a resumed attempt with other code is refused.
    """
    root = Path(components.__file__).parent
    sources = sorted(path for path in root.rglob("*") if path.suffix in (".py", ".html", ".css"))
    return json_digest({path.relative_to(root).as_posix(): file_digest(path) for path in sources})


def config_digest(config: RunConfig) -> str:
    """SHA-256 of the whole configuration, stamped on every artifact as `config_sha`."""
    return json_digest(config.model_dump(mode="json"))
