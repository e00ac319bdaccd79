"""`import fedemb`: the names it gives, what it costs, and the lines that README shows."""

import contextlib
import doctest
import importlib
import io
import os
import re
import sys
from pathlib import Path

import pytest

import fedemb
from tests.conftest import REPOSITORY
from tests.kit.notebook import code_of_notebook
from tests.kit.process import python


def test_import_fedemb_loads_only_the_standard_library():
    script = (
        "import sys; before = set(sys.modules); import fedemb; dir(fedemb)\n"
        "print(*sorted({name.split('.')[0] for name in set(sys.modules) - before}))"
    )
    assert set(python("-c", script).split()) <= {"fedemb", *sys.stdlib_module_names}


@pytest.mark.long
def test_plans_and_prices_without_tensorflow():
    script = (
        "import sys, fedemb\n"
        "mechanism = fedemb.GroupPoissonGaussianConfig(rounds=2,\n"
        "    noise_multiplier=1.0, sampling_probability=0.1)\n"
        "assert fedemb.epsilon(fedemb.plan(mechanism, virtual_clients=40), delta=1e-4) > 0\n"
        "fedemb.Simulation\n"
        "assert not {'tensorflow', 'kfp', 'apache_beam'} & set(sys.modules)"
    )
    python("-c", script)


@pytest.mark.parametrize("name", fedemb.__all__)
def test_every_public_name_is_there_and_documented(name):
    found = getattr(fedemb, name)
    assert getattr(fedemb, name) is found
    assert name == "MechanismConfig" or found.__doc__


def test_readme_shows_the_code_of_the_notebook_in_at_most_25_lines():
    code = code_of_notebook()
    assert f"```python\n{code}```" in (REPOSITORY / "README.md").read_text()
    assert len([line for line in code.splitlines() if line]) <= 25


@pytest.mark.long
def test_notebook_runs_and_prints_the_cost_of_privacy():
    """Real training, each time with other noise and coins."""
    printed, names = io.StringIO(), {}
    with contextlib.redirect_stdout(printed):
        exec(compile(code_of_notebook(), "quickstart.ipynb", "exec"), names)
    lines = printed.getvalue().splitlines()
    found = dict(re.findall(r"^(.*): (\d\.\d+) \[", printed.getvalue(), re.MULTILINE))
    assert list(found) == ["without training", "private", "without privacy"]
    before, private, without = map(float, found.values())
    assert before + 0.05 < min(private, without)
    assert lines[2].startswith("simulation, not to be released: (9.003, ")
    assert "epsilon is infinite" in lines[4]


# ---- The examples in docstrings run ----


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
def test_docstring_examples_run(name):
    found = doctest.testmod(importlib.import_module(name))
    assert found.attempted
    assert not found.failed, "see what was printed"


# ---- Commands import only what they use ----


PLANNED = "from fedemb.pipelines.cli.main import main; main(['plan', '--config', 'quickstart'])"
UNUSED = ("scipy.stats", "scipy.signal", "dp_accounting.pld", "matplotlib", "kfp")


@pytest.mark.long
@pytest.mark.parametrize(
    "use",
    [
        f"try:\n    {PLANNED}\nexcept SystemExit: pass",
        "import fedemb.ledger.budget",
        "import fedemb.release.privacy_report",
        "import fedemb.release.decide",
    ],
)
def test_planning_and_ledger_import_no_statistics_of_scipy(use):
    loaded = f"print(*[name for name in {UNUSED} if name in sys.modules])"
    assert python("-c", f"import sys\n{use}\n{loaded}").splitlines()[-1] == ""


def test_ledgers_and_runs_are_read_without_scipy():
    packages = ("ledger", "pipelines.run.local", "pipelines.cli.review")
    imports = "; ".join(f"import fedemb.{package}" for package in packages)
    assert python("-c", f"import sys; {imports}; print('scipy' in sys.modules)").strip() == "False"


def test_lazily_imported_dp_accounting_is_complete_for_other_importers():
    script = """
import fedemb.privacy, sys
from dp_accounting import dp_event, rdp
assert "dp_accounting.pld" not in sys.modules
from dp_accounting import PoissonSampledDpEvent, pld
import dp_accounting
assert dp_accounting.pld.PLDAccountant is pld.PLDAccountant
assert dp_accounting.PoissonSampledDpEvent is dp_event.PoissonSampledDpEvent
assert dp_accounting.get_sigma_gaussian(1.0, 1e-5) > 0
assert type(dp_accounting) is type(sys)
try:
    dp_accounting.absent
except AttributeError as error:
    print(error)
"""
    assert "absent" in python("-c", script)
