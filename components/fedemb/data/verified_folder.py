"""Private folder whose content matches the commitment in the ledger.

`UserStore` and `GroupIndex` open only verified folders, so a step cannot read unchecked users.
Steps get a verified folder from `fedemb.runtime.private_inputs.open_private`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from fedemb.errors import PlanMismatch
from fedemb.foundation.digests import tree_digest
from fedemb.keys import commit_to_people


@dataclass(frozen=True)
class FolderCommitment:
    """Commitment in the ledger to one private folder of one attempt."""

    run_id: str
    attempt: int
    value: str
    """Keyed commitment, see `keys.commit_to_people`."""
    key: bytes = field(repr=False)
    """Commitment key of the policy."""


class VerifiedFolder:
    """Local folder that matched its commitment when it was opened.

    Attributes:
      path: path of the folder. Raw.
    """

    def __init__(self, path: Path, commitment: FolderCommitment) -> None:
        """Reads every byte of the folder once and compares it with the commitment.

        Raises:
          PlanMismatch: the folder has other or additional content.
        """
        self.path = Path(path)
        self._what = f"{self.path.name}/ of run {commitment.run_id}"
        self._files = _versions(self.path)
        of_people = commitment.run_id, commitment.attempt, tree_digest(self.path)
        if commit_to_people(commitment.key, *of_people) != commitment.value:
            raise PlanMismatch(
                f"{self._what} is not the folder the run is bound to in the ledger: it was changed "
                "or replaced, or another storage.private_root is named. Restore the folder that "
                "partition_users wrote, or start a run with a new id"
            )

    def check_unchanged(self) -> None:
        """Compares names, sizes and modification times with those at the time of the check.

        Raises:
          PlanMismatch: a file was added, removed or written since the check.
        """
        if _versions(self.path) != self._files:
            raise PlanMismatch(
                f"{self._what} changed while this step was reading it, so its result is not kept; "
                "find out what writes to the private root, then run the step again"
            )


def _versions(root: Path) -> dict[str, tuple[int, int, int]]:
    """Returns inode, size and modification time of every file below a folder."""
    found: dict[str, tuple[int, int, int]] = {}
    for path in root.rglob("*"):
        if path.is_file():
            status = path.stat()
            name = path.relative_to(root).as_posix()
            found[name] = status.st_ino, status.st_size, status.st_mtime_ns
    return found
