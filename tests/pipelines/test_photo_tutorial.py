"""The script and the settings of the tutorial on photos."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import numpy as np

from fedemb.data.columns import guess_source
from fedemb.data.photos import PhotoReader
from fedemb.data.sources import read_public_images

SCRIPT = Path("docs/examples/cifar10.py")
PAGE = Path("docs/tutorials/photos.md")


def test_script_of_the_tutorial_writes_photos_that_init_reads(tmp_path):
    spec = importlib.util.spec_from_file_location("cifar10", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    pixels = np.random.default_rng(0).integers(0, 256, (4, 32, 32, 3), np.uint8)
    script.write(tmp_path / "p.parquet", pixels, ["cat", "dog", "cat", "ship"])
    source = guess_source(str(tmp_path / "p.parquet"), {"user_id": "none"})
    assert (source.columns.user_id, source.columns.label) == (None, "label")
    images, labels = read_public_images(source, PhotoReader(32, 3))
    np.testing.assert_array_equal(images, pixels)
    assert labels.tolist() == ["cat", "dog", "cat", "ship"]
    assert re.findall(r"--classes ([a-z,]+)", PAGE.read_text()) == [",".join(script.CLASSES)]
