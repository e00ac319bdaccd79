"""Private folders that tests made themselves, as readers take them."""

from pathlib import Path

from fedemb.data.verified_folder import VerifiedFolder


def as_committed(folder: Path) -> VerifiedFolder:
    """A folder as if it had been compared with a commitment."""
    return VerifiedFolder(folder)
