"""Makes the picture of README: a released run, its page in Chromium, docs/images/run.png.

    make readme

The picture records the digest of the templates that it shows. `test_picture.py` fails when a
template has changed since.
"""

from __future__ import annotations

import hashlib
import io
import tempfile
from pathlib import Path

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from fedemb.pipelines.run.command import run
from fedemb.reports.report import TEMPLATES
from tests.kit.browser_page import chromium

PICTURE = Path(__file__).parents[2] / "docs" / "images" / "run.png"
SHOWN = ("base.html", "macros.html", "run_page.html", "style.css")
KEY = "fedemb-templates"
SIZE = (760, 840)
"""Width and height of the part that is shown, in pixels."""


def templates_digest() -> str:
    """Returns the SHA-256 digest of the templates of the run page."""
    return hashlib.sha256(b"\0".join((TEMPLATES / name).read_bytes() for name in SHOWN)).hexdigest()


def main() -> None:
    """Runs the quickstart and writes the picture of its page."""
    with tempfile.TemporaryDirectory() as folder:
        released = run("quickstart", runs=Path(folder) / "runs")
        shot = Path(folder) / "page.png"
        with chromium(Path(folder) / "profile") as browser:
            browser.open(released.index, width=SIZE[0], scheme="light", screenshot=shot)
        page = Image.open(io.BytesIO(shot.read_bytes())).crop((0, 0, *SIZE))
    recorded = PngInfo()
    recorded.add_text(KEY, templates_digest())
    page.convert("P", palette=Image.Palette.ADAPTIVE).save(PICTURE, optimize=True, pnginfo=recorded)


if __name__ == "__main__":
    main()
