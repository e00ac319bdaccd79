"""Private folder whose content matches the commitment in the ledger.

`UserStore` and `GroupIndex` open only verified folders, so a step cannot read unchecked users.
Steps get a verified folder from `fedemb.runtime.private_inputs.open_private`.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from fedemb.errors import PlanMismatch, StorageError
from fedemb.foundation.canonical_json import json_digest
from fedemb.keys import commit_to_people

_PIECE = 1 << 20
"""Number of bytes read at once."""


@dataclass(frozen=True)
class FolderCommitment:
    """Commitment in the ledger to one private folder of one attempt."""

    run_id: str
    attempt: int
    value: str
    """Keyed commitment, see `keys.commit_to_people`."""
    key: bytes = field(repr=False)
    """Commitment key of the policy."""


@dataclass(frozen=True)
class VerifiedFolder:
    """Copy of a folder that matched its commitment; made by `verified_copy`."""

    path: Path
    """Path of the copy. Raw."""


@contextmanager
def verified_copy(source: Path, commitment: FolderCommitment) -> Iterator[VerifiedFolder]:
    """Yields a copy of a folder in a temporary folder that only this user can open.

    The digest is computed from the bytes that are written to the copy. Changing, replacing or
    renaming the folder afterwards changes nothing that a step reads. A killed process leaves the
    copy behind, see docs/how_to/delete_a_user.md.

    Raises:
      PlanMismatch: the folder has other or additional content.
      StorageError: the folder cannot be copied.
    """
    with tempfile.TemporaryDirectory(prefix="fedemb-private-") as scratch:
        copy = Path(scratch, source.name)
        try:
            digests = _copied(source, copy)
        except OSError as error:
            raise StorageError(
                f"{source.name}/ of run {commitment.run_id} cannot be copied to {scratch}: "
                f"{error.strerror}. The copy needs as much space as the folder; set TMPDIR"
            ) from error
        of_people = commitment.run_id, commitment.attempt, json_digest(digests)
        if commit_to_people(commitment.key, *of_people) != commitment.value:
            raise PlanMismatch(
                f"{source.name}/ of run {commitment.run_id} is not the folder the run is bound to "
                "in the ledger: it was changed or replaced, or another storage.private_root is "
                "named. Restore the folder that partition_users wrote, or start a run with a new id"
            )
        yield VerifiedFolder(copy)


def _copied(source: Path, copy: Path) -> dict[str, str]:
    """Copies all files; returns the digests of the written bytes by name, as `tree_digests`."""
    digests: dict[str, str] = {}
    copy.mkdir()
    for path in sorted(source.rglob("*")):
        if path.is_dir():
            continue
        name = path.relative_to(source)
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        digest = hashlib.sha256()
        with (copy / name).open("xb") as target:
            for piece in _pieces(path):
                digest.update(piece)
                target.write(piece)
        digests[name.as_posix()] = digest.hexdigest()
    return digests


def _pieces(path: Path) -> Iterator[bytes]:
    opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(opened, "rb", buffering=0) as file:
        if not stat.S_ISREG(os.fstat(opened).st_mode):
            raise PlanMismatch(f"{path.name} in the private root is not a regular file. Remove it.")
        while piece := file.read(_PIECE):
            yield piece
