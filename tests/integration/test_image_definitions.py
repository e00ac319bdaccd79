"""What of the images can be checked without building them: one Dockerfile, four locks, one bake."""

import ast
import json
import os
import re
import runpy
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.metadata import distributions
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


@pytest.mark.long
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


def test_package_dependencies_equal_the_inputs_of_its_locks():
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


def test_missing_tensorflow_privacy_names_the_install_command(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("tensorflow_privacy.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorflow_privacy", None)  # as if it were not there
    with pytest.raises(ConfigError, match=r"--no-deps tensorflow-privacy==0\.9\.0"):
        runpy.run_module("fedemb.privacy.dp_query")


# ---- Whatever the code ----


PACKAGES = ROOT / "components"
OURS = ("fedemb",)
NOT_IN_LIGHT = {}
NOT_IN_TRAINER = {
    "tensorflow": "training.backend: tensorflow, which such an image refuses by name",
    "tensorflow_privacy": "the same",
}
"""Of gpu and tpu, where JAX trains."""


@cache
def imports(source: str) -> tuple[str, ...]:
    """Everything a module imports, at its top or later, but for its types alone."""
    tree, found = ast.parse(source), list[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [name.name for name in node.names]
        elif isinstance(node, ast.ImportFrom):
            found += [f"{node.module}.{name.name}" for name in node.names]
    return tuple(found)


def files_of(module: str) -> Iterator[Path]:
    """The files of ours that importing a dotted name reads."""
    parts = module.split(".")
    for end in range(1, len(parts) + 1):
        path = PACKAGES.joinpath(*parts[:end])
        yield from (
            file for file in (path.with_suffix(".py"), path / "__init__.py") if file.exists()
        )


def needed(start: list[Path]) -> dict[str, Path]:
    """Names from outside that these files import, and the files they import -> one who asks."""
    found: dict[str, Path] = {}
    todo, seen = list(start), set()
    while todo:
        file = todo.pop()
        if file in seen:
            continue
        seen.add(file)
        for name in imports(file.read_text()):
            top = name.partition(".")[0]
            if top in OURS:
                todo.extend(files_of(name))
            elif top not in sys.stdlib_module_names:
                found.setdefault(name, file)
    return found


@cache
def owners() -> dict[str, set[str]]:
    """Dotted module or package -> the installed distributions that provide it."""
    found: dict[str, set[str]] = {}
    for distribution in distributions():
        name = re.sub(r"[-_.]+", "-", distribution.metadata["Name"]).lower()
        for file in distribution.files or []:
            if file.suffix in (".py", ".so") and ".." not in file.parts:
                module = [*file.parent.parts, file.name.partition(".")[0]]
                module = module[:-1] if module[-1] == "__init__" else module
                for end in range(1, len(module) + 1):
                    found.setdefault(".".join(module[:end]), set()).add(name)
    return found


def missing(names: dict[str, Path], lock: str, known: dict[str, str]) -> dict[str, Path]:
    """Names that no distribution of a lock provides."""
    locked = {
        re.sub(r"[-_.]+", "-", name).lower() for name in re.findall(r"^([\w.-]+)[\[=]", lock, re.M)
    }
    wrong: dict[str, Path] = {}
    for name, file in names.items():
        parts = name.split(".")
        if parts[0] in known:
            continue
        ends = range(len(parts), 0, -1)
        brought = next(owners()[key] for end in ends if (key := ".".join(parts[:end])) in owners())
        if not brought & locked:
            wrong[name] = file
    return wrong


KNOWN = {"light": NOT_IN_LIGHT, "gpu": NOT_IN_TRAINER, "tpu": NOT_IN_TRAINER}


def roots(flavour: str) -> list[Path]:
    """The files of an image that its steps start with; `pretrain_public` then runs in cpu."""
    if flavour == "cpu":
        folders = (ROOT / "components", ROOT / "pipelines")
        return [file for folder in folders for file in folder.rglob("*.py")]
    steps = (PACKAGES / "fedemb" / "steps").glob("*.py")
    image = "light" if flavour == "light" else "trainer"
    found = [file for file in steps if f'image="{image}"' in file.read_text()]
    found = [file for file in found if file.stem != "pretrain_public"]
    assert len(found) >= 3
    if image == "trainer":
        found.append(PACKAGES / "fedemb" / "training" / "hosts.py")
    return found


@pytest.mark.long
@pytest.mark.parametrize("flavour", ["light", "cpu", "gpu", "tpu"])
def test_image_has_every_package_its_steps_import(flavour):
    lock = (ROOT / "requirements" / f"{flavour}.txt").read_text()
    names = needed(roots(flavour))
    assert len(names) > 50
    assert not missing(names, lock, KNOWN.get(flavour, {}))


def test_steps_of_the_light_image_do_not_import_tensorflow_or_beam():
    tops = {name.partition(".")[0] for name in needed(roots("light"))}
    assert {"dp_accounting", "cryptography"} <= tops
    assert not tops & {"tensorflow", "keras", "apache_beam", "tfx_bsl", "tensorflow_privacy"}


# ---- Images have what they promise ----


LIGHT = os.environ.get("FEDEMB_LIGHT_IMAGE", "localhost/fedemb-light:0.1.0")
CPU = os.environ.get("FEDEMB_CPU_IMAGE", "localhost/fedemb-cpu:0.1.0")


def _inspect(engine: dict[str, str], image: str) -> dict:
    import docker

    client = docker.DockerClient(base_url=engine["DOCKER_HOST"])
    try:
        return client.images.get(image).attrs
    except docker.errors.ImageNotFound:
        pytest.skip(f"no image {image} here: run `make test-containers`")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("image", [LIGHT, CPU])
def test_image_has_no_entrypoint_an_unprivileged_user_and_labels(engine, image):
    config = _inspect(engine, image)["Config"]
    assert not config.get("Entrypoint")
    assert config["User"] == "65532:65532"
    for label in ("title", "version", "revision", "licenses", "created"):
        assert config["Labels"][f"org.opencontainers.image.{label}"]


def _python(engine: dict[str, str], image: str, program: str) -> str:
    import docker

    _inspect(engine, image)
    client = docker.DockerClient(base_url=engine["DOCKER_HOST"])
    output = client.containers.run(
        image, ["python3", "-c", program], remove=True, network_mode="none", stderr=False
    )
    return output.decode()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_light_and_cpu_images_contain_the_same_code_and_an_sbom(engine):
    program = (
        "import json\n"
        "from fedemb.runtime.provenance import code_digest\n"
        "parts = json.load(open('/opt/fedemb/sbom.cdx.json'))['components']\n"
        "print(json.dumps([code_digest(), len(parts)]))"
    )
    light, cpu = (json.loads(_python(engine, image, program)) for image in (LIGHT, CPU))
    assert light[0] == cpu[0]
    assert 50 < light[1] < cpu[1]
