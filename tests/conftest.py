"""Fixtures that several parts share."""

import os
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Folder of the real images; skips where they are not at hand."""
    folder = Path(os.environ.get("FEDEMB_DATA", REPOSITORY.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no real images at {folder}; set FEDEMB_DATA to the folder that holds them")
    return folder
