"""Private folders that tests made themselves, as readers take them."""

from pathlib import Path

from fedemb.data.client_data import VerifiedFolder


def as_committed(folder: Path) -> VerifiedFolder:
    """A folder as if it had been compared with a commitment."""
    return VerifiedFolder(folder)
