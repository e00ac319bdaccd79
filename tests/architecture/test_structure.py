"""The structure of the product: no cycles, small subpackages, short functions."""

from collections import Counter
from pathlib import Path

import pytest

from tests.architecture.structure import Module, cycle, import_graph, modules

MOST_FILES = 20
MOST_SUBPACKAGES = 17
LONGEST = 60
MOST_PARAMETERS = 8
ANY_AT_SEAMS = {"foundation": 2, "pipelines": 25, "privacy": 1, "reports": 13, "steps": 3}
"""Subpackage -> maximum number of `Any` at its seams; a subpackage that is not listed has none."""
TOP_LEVEL_MODULES = {"__main__", "errors", "fedemb"}
"""Modules directly below `fedemb`."""


@pytest.fixture(scope="module")
def product() -> dict[str, Module]:
    return modules()


def test_no_modules_import_each_other_in_a_cycle(product):
    """Imports inside functions and under `TYPE_CHECKING` count; `make check` has the layers."""
    assert cycle({"a": {"b"}, "b": {"a"}})
    assert cycle(import_graph(product)) == []


def test_imports_inside_functions_and_for_types_are_found(tmp_path):
    source = tmp_path / "one.py"
    source.write_text(
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from fedemb.two import Name\n"
        "def late():\n    from fedemb import three\n    import fedemb.four\n"
    )
    names = ("fedemb.two", "fedemb.three", "fedemb.four")
    others = {name: Module(name, tmp_path / "unread.py") for name in names}
    assert sorted(Module("fedemb.one", source).imports(others)) == sorted(names)


def test_file_and_subpackage_counts_are_within_limits(product):
    folders = Counter(module.path.resolve().parent for module in product.values())
    crowded = {folder: count for folder, count in folders.items() if count > MOST_FILES}
    assert not crowded
    subpackages = {module.subpackage for module in product.values()} - TOP_LEVEL_MODULES
    assert len(subpackages) <= MOST_SUBPACKAGES, sorted(subpackages)


def test_functions_are_short_and_take_few_parameters(product):
    """Inputs of a KFP step are the parameters of its component."""
    long, wide = [], []
    for module in product.values():
        is_step = module.subpackage == "steps"
        functions = list(module.functions())
        long += [item.name for item in functions if item.lines > LONGEST]
        wide += [i.name for i in functions if i.parameters > MOST_PARAMETERS and not is_step]
    assert not long
    assert not wide


def test_any_in_public_signatures_stays_within_its_limit(product):
    found = Counter()
    for module in product.values():
        found[module.subpackage] += module.any_at_seams()
    assert {part: n for part, n in found.items() if n > ANY_AT_SEAMS.get(part, 0)} == {}


def test_any_is_found_in_signatures_attributes_and_names(tmp_path):
    source = tmp_path / "one.py"
    source.write_text(
        "from typing import Any, TypeAlias\n"
        "Json = dict[str, Any]\nOther: TypeAlias = list[Any]\n_value: int = 1\n"
        "class Public:\n    field: Any\n    def act(self, one: Any, **rest: Any) -> int: ...\n"
        "class _Hidden:\n    field: Any\n    def act(self, one: Any) -> Any: ...\n"
        "def _hidden(one: Any) -> Any: ...\n"
    )
    assert Module("fedemb.one", source).any_at_seams() == 5


def test_only_errors_and_main_are_top_level_modules(product):
    loose = {name for name, module in product.items() if module.path.parent.name == "fedemb"}
    assert {Path(product[name].path).stem for name in loose} <= {"__init__", "__main__", "errors"}
