"""What code ran: one digest over the sources of this package."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import fedemb
from fedemb.documents.artifacts import file_digest, json_digest


@cache
def code_digest() -> str:
    """SHA-256 over names and contents of the sources of library and steps, 64 hexadecimal digits.

    Part of what a reservation binds: a resumed attempt with other code is refused.
    """
    root = Path(fedemb.__file__).parent
    sources: list[Path] = []
    for folder, folders, names in os.walk(root, followlinks=True):  # a checkout links its steps
        if Path(folder) == root and "pipelines" in folders:
            folders.remove("pipelines")
        sources += [Path(folder, name) for name in names if name.endswith((".py", ".html", ".css"))]
    sources.sort()
    return json_digest({path.relative_to(root).as_posix(): file_digest(path) for path in sources})
