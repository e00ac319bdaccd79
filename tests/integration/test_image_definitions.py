"""What of the images can be checked without building them: one Dockerfile, four locks, one bake."""

import re
import runpy
import sys
import tomllib
from pathlib import Path

import pytest

from fedemb.errors import ConfigError

ROOT = Path(__file__).parents[2]
FLAVOURS = ["cpu", "gpu", "light", "tpu"]
DOCKERFILE = (ROOT / "images" / "Dockerfile").read_text()


def _bake() -> dict:
    hcl2 = pytest.importorskip("hcl2", reason="the package python-hcl2 is not installed")
    return hcl2.loads((ROOT / "images" / "docker-bake.hcl").read_text())


def _words(value) -> list[str]:
    return sorted(str(item).strip('"') for item in value)


def test_bake_builds_every_flavour_that_has_a_lock():
    (target,) = (body for named in _bake()["target"] for body in named.values())
    assert _words(target["matrix"]["flavour"]) == FLAVOURS
    for flavour in FLAVOURS:
        assert (ROOT / "requirements" / f"{flavour}.txt").is_file()


def test_bake_passes_arguments_the_dockerfile_knows_and_the_version_of_the_package():
    (target,) = (body for named in _bake()["target"] for body in named.values())
    known = set(re.findall(r"^ARG (\w+)", DOCKERFILE, re.MULTILINE))
    assert set(_words(target["args"])) <= known
    variables = {
        name.strip('"'): body for named in _bake()["variable"] for name, body in named.items()
    }
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert str(variables["VERSION"]["default"]).strip('"') == version


def test_image_ends_as_an_unprivileged_user_without_entrypoint():
    runtime = DOCKERFILE.rpartition("AS runtime")[2]
    assert re.findall(r"^USER (.*)", runtime, re.MULTILINE) == ["65532:65532"]
    assert not re.search(r"^ENTRYPOINT", DOCKERFILE, re.MULTILINE)
    assert "--require-hashes" in DOCKERFILE


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_lock_pins_every_package_with_a_hash_and_names_no_index(flavour):
    lines = (ROOT / "requirements" / f"{flavour}.txt").read_text().splitlines()
    packages = [line for line in lines if re.match(r"[\w.\[\]-]+==", line)]
    assert len(packages) > 50
    assert sum("--hash=sha256:" in line for line in lines) >= len(packages)
    assert not [line for line in lines if re.match(r"\s*(--.*index|--find-links|-e |git\+)", line)]


@pytest.mark.parametrize(("flavour", "device"), [("gpu", "jax-cuda12-plugin"), ("tpu", "libtpu")])
def test_image_of_an_accelerator_holds_jax_for_it_and_no_tensorflow(flavour, device):
    lock = (ROOT / "requirements" / f"{flavour}.txt").read_text()
    assert re.search(rf"^{device}==", lock, re.MULTILINE)
    assert not re.search(r"^(tensorflow|apache-beam|tfx-bsl)\b[^#]*==", lock, re.MULTILINE)


def test_the_package_names_what_its_lock_is_compiled_from():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    files = (ROOT / "requirements" / f"{name}.in" for name in ("trainer", "cpu"))
    wanted = {line for file in files for line in file.read_text().splitlines()}
    wanted = {line for line in wanted if not line.startswith(("#", "-"))}
    wanted.remove("tensorflow-privacy==0.9.0")  # whose pins pip cannot fulfil beside these
    wanted -= {"croniter", "jsonschema"}  # which no module of the package imports
    extras = project["optional-dependencies"]
    named = {
        line
        for name in ("train", "jax", "beam", "kfp", "registries", "stores")
        for line in extras[name]
    }
    # Verification of a bundle, from base on, reads weights; TensorFlow installs it for all.
    assert {*project["dependencies"], *named} - {"h5py"} == wanted
    tools = (ROOT / "requirements" / "dev.in").read_text().splitlines()
    tools = [line.split("#")[0].strip() for line in tools if not line.startswith(("#", "-"))]
    assert extras["dev"] == ["fedemb[all]", *tools]


def test_what_pip_leaves_out_is_asked_for_in_one_sentence(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("tensorflow_privacy.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorflow_privacy", None)  # as if it were not there
    with pytest.raises(ConfigError, match=r"--no-deps tensorflow-privacy==0\.9\.0"):
        runpy.run_module("fedemb.privacy.dp_query")
