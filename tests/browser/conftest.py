"""A browser for the tests of pages."""

import os
import shutil
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    from tests.kit.browser_page import chromium

    if not (shutil.which("chromium") or shutil.which("chromium-browser")):
        pytest.skip("no chromium binary; apt-get install chromium lets these tests look")
    with chromium(tmp_path_factory.mktemp("profile")) as running:
        yield running


@pytest.fixture(scope="session")
def screenshots(tmp_path_factory) -> Path:
    """Folder of screenshots: FEDEMB_SCREENSHOTS, or a temporary folder."""
    folder = Path(os.environ.get("FEDEMB_SCREENSHOTS") or tmp_path_factory.mktemp("screenshots"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder
