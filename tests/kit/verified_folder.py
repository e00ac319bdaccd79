"""Private folders that tests made themselves, as readers take them."""

from pathlib import Path

from fedemb.data.verified_folder import FolderCommitment, VerifiedFolder
from fedemb.foundation.digests import tree_digest
from fedemb.keys import commit_to_people


def as_committed(folder: Path) -> VerifiedFolder:
    """Commits to a folder as it is and opens it."""
    value = commit_to_people(b"key", "run", 1, tree_digest(folder))
    return VerifiedFolder(folder, FolderCommitment("run", 1, value, b"key"))
