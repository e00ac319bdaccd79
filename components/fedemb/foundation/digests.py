"""SHA-256 of files and folders."""

from __future__ import annotations

import hashlib
from pathlib import Path

from fedemb.errors import ArtifactError
from fedemb.foundation.canonical_json import json_digest


def file_digest(path: Path) -> str:
    """Returns the SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def limited_digest(path: Path, size: int) -> str:
    """Returns the SHA-256 of a file of at most `size` bytes; reads at most `size` + 1 bytes.

    Raises:
      ArtifactError: the file is larger.
    """
    digest, left = hashlib.sha256(), size
    with path.open("rb") as file:
        while data := file.read(min(_PIECE, left + 1)):
            left -= len(data)
            if left < 0:
                raise ArtifactError(
                    f"{path.name} is larger than the expected {size} bytes. Fetch it again."
                )
            digest.update(data)
    return digest.hexdigest()


def tree_digests(root: Path) -> dict[str, str]:
    """Returns the SHA-256 of every file below `root`, by sorted POSIX path relative to `root`."""
    files = sorted(path for path in root.rglob("*") if path.is_file())
    return {path.relative_to(root).as_posix(): file_digest(path) for path in files}


def tree_digest(root: Path) -> str:
    """Returns one digest of all files below `root` and their names."""
    return json_digest(tree_digests(root))


_PIECE = 1 << 20
"""Number of bytes read at once."""
