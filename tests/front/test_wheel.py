"""A wheel in a bare environment, far from the checkout, does all that the checkout does."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from tests.kit.notebook import code_of_notebook

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]
UV = Path(sys.executable).with_name("uv")
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel of this checkout."""
    folder = tmp_path_factory.mktemp("dist")
    build = ["build", "--wheel", "--no-build-isolation", "--python", sys.executable]
    subprocess.run([UV, *build, "--out-dir", folder], cwd=REPOSITORY, check=True)
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def bare(wheel, tmp_path_factory):
    """Folder of programs of an environment made from the lock and the wheel alone."""
    folder = tmp_path_factory.mktemp("bare") / "venv"
    subprocess.run([UV, "venv", "--python", sys.executable, folder], check=True)
    install = [UV, "pip", "install", "--python", folder / "bin" / "python", "--no-deps"]
    lock = REPOSITORY / "requirements" / "cpu.txt"
    subprocess.run([*install, "--require-hashes", "-r", lock], check=True)
    subprocess.run([*install, wheel], check=True)
    return folder / "bin"


def outside(bare, tmp_path, *command):
    done = subprocess.run(
        [bare / command[0], *command[1:]],
        cwd=tmp_path,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-3000:]
    return done.stdout


def test_wheel_installs_only_the_package_fedemb(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {name for name in tops if not name.endswith(".dist-info")} == {"fedemb"}
    assert "fedemb/py.typed" in names
    assert len(names) == len(set(names)), "steps and pipelines hang in it once"


def test_code_of_the_notebook_runs(bare, tmp_path):
    script = tmp_path / "quickstart.py"
    script.write_text(code_of_notebook() + "print(fedemb.__file__)\n")
    *printed, place = outside(bare, tmp_path, "python", str(script)).splitlines()
    assert Path(place).is_relative_to(bare.parent)
    said = [line.split(":")[0].split(",")[0] for line in printed]
    assert said[1:] == ["private", "simulation", "without privacy", "simulation"], printed


@pytest.fixture(scope="module")
def released(bare, tmp_path_factory):
    """Folder of a quickstart run and the bundle that it released."""
    folder = tmp_path_factory.mktemp("run")
    printed = outside(bare, folder, "fedemb", "run", "--run-id", "quickstart")
    release = next(line for line in printed.splitlines() if line.startswith("release: "))
    bundle = Path(release.removeprefix("release: ").removeprefix("file://"))
    assert (bundle / "manifest.json").exists(), printed
    return folder, bundle


@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
def test_base_verifies_a_release_and_reads_its_report(version, wheel, released, tmp_path):
    """Nothing but the wheel and what pip takes from its metadata."""
    folder, bundle = released
    venv = tmp_path / "venv"
    made = subprocess.run([UV, "venv", "--quiet", "--python", version, venv], check=False)
    if made.returncode:
        pytest.skip(f"Python {version} is not installed and could not be fetched")
    subprocess.run(
        [UV, "pip", "install", "--quiet", "--python", venv / "bin" / "python", wheel], check=True
    )
    site = next(venv.glob("lib/python*/site-packages"))
    assert len(list(site.glob("*.dist-info"))) <= 60
    assert sum(file.stat().st_size for file in site.rglob("*") if file.is_file()) < 400 << 20
    trust = next((folder / "runs" / "quickstart").rglob("trust.json"))
    base = venv / "bin"
    printed = outside(
        base, folder, "fedemb", "verify", bundle, "--trust", trust, "--skip-saved-model"
    )
    assert printed.startswith("verified: ")
    ledger = ("--ledger", trust.parent)
    assert "protected with epsilon 7.5" in outside(base, folder, "fedemb", "runs", "quickstart")
    assert "quickstart" in outside(base, folder, "fedemb", "runs")
    assert "quickstart" in outside(base, folder, "fedemb", "ledger", "show", *ledger)
    outside(base, folder, "fedemb", "ledger", "verify", *ledger)
    outside(base, folder, "fedemb", "plan", "--config", "quickstart")
