"""Whatever the code of a step imports is in the lock of its image: steps fail late, locks early."""

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from importlib.metadata import distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
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


def test_light_steps_never_come_near_tensorflow_or_beam():
    tops = {name.partition(".")[0] for name in needed(roots("light"))}
    assert {"dp_accounting", "cryptography"} <= tops
    assert not tops & {"tensorflow", "keras", "apache_beam", "tfx_bsl", "tensorflow_privacy"}
