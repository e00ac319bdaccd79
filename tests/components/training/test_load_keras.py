"""What Keras loads in a step process."""

import json
import subprocess
import sys

import pytest

SCRIPT = """
import gc, json, sys
from fedemb.models.keras_backend import load_keras, use_backend
if {backend!r}:
    use_backend({backend!r})
load_keras()
import keras
found = {{name: name in sys.modules for name in ("sklearn", "jax")}}
found |= {{"backend": keras.backend.backend(), "collects": gc.isenabled()}}
found["frozen"] = gc.get_freeze_count() > 100_000
import jax, sklearn
found["later"] = bool(jax.__version__ and sklearn.__version__)
print(json.dumps(found))
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("backend", "jax"), [("tensorflow", False), ("", False), ("jax", True)], ids=str
)
def test_optional_packages_are_left_out_and_can_be_imported_later(backend, jax, tmp_path):
    pytest.importorskip("sklearn")
    environment = {"KERAS_HOME": str(tmp_path), "TF_CPP_MIN_LOG_LEVEL": "3", "HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(backend=backend)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == {
        "sklearn": False,
        "jax": jax,
        "backend": backend or "tensorflow",
        "collects": True,
        "frozen": True,
        "later": True,
    }


@pytest.mark.long
def test_settings_file_of_keras_with_jax_loads_jax(tmp_path):
    (tmp_path / "keras.json").write_text(json.dumps({"backend": "jax"}))
    environment = {"KERAS_HOME": str(tmp_path), "TF_CPP_MIN_LOG_LEVEL": "3", "HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(backend="")],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1])["backend"] == "jax"
