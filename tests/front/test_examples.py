"""The examples in docstrings run."""

import doctest
import importlib
import os
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY


def modules_with_examples():
    """Dotted names; steps and pipelines hang in the package by links."""
    for root, place in ((REPOSITORY / "components", "fedemb"), (REPOSITORY, "studies")):
        for folder, _, names in os.walk(root / place, followlinks=True):
            for path in (Path(folder, name) for name in names if name.endswith(".py")):
                if ">>> " in path.read_text():
                    dotted = path.relative_to(root).with_suffix("").parts
                    yield ".".join(dotted).removesuffix(".__init__")


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(modules_with_examples()))
def test_examples_run(name):
    found = doctest.testmod(importlib.import_module(name))
    assert found.attempted
    assert not found.failed, "see what was printed"
