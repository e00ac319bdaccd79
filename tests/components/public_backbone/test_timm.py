"""Networks of full size in timm's naming give the features that timm computes, to 1e-4."""

import subprocess
from pathlib import Path

import numpy as np
import pytest

from fedemb.models.preprocessing import preprocess
from fedemb.models.public_backbone.convert import ARCHITECTURES, convert_tensors

PYTHON = Path(__file__).parents[3] / ".venv-timm" / "bin" / "python"
SCRIPT = Path(__file__).with_name("timm_reference.py")
FILES = ("{}.safetensors", "{}.pth", "{}_old.pth")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    if not PYTHON.exists():
        pytest.skip("PyTorch and timm are not installed; `make test-timm` installs them")
    path = tmp_path_factory.mktemp("timm")
    subprocess.run([PYTHON, SCRIPT, path], check=True, timeout=800)
    return path


def test_features_are_those_of_timm(folder):
    compared = set()
    for reference in sorted(folder.glob("*.npz")):
        name = reference.stem.split("-")[0]
        with np.load(reference) as saved:
            images, wanted = saved["images"], saved["features"]
        for pattern in FILES:
            path = folder / pattern.format(reference.stem)
            network = convert_tensors(path, name, images.shape[1], None).network
            found = np.asarray(network(preprocess(images)))
            assert np.abs(found - wanted).max() < 1e-4 * np.abs(wanted).max(), path.name
        compared.add(name)
    assert compared == ARCHITECTURES.keys()
