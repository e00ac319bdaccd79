"""`import fedemb`: the names it gives, what it costs, and the lines that README shows."""

import contextlib
import io
import re
import subprocess
import sys

import pytest

import fedemb
from tests.conftest import REPOSITORY
from tests.kit.readme import lines_of_readme


def test_import_brings_nothing_along():
    script = (
        "import sys; before = set(sys.modules); import fedemb; dir(fedemb)\n"
        "print(*sorted({name.split('.')[0] for name in set(sys.modules) - before}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert set(done.stdout.split()) <= {"fedemb", *sys.stdlib_module_names}


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
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize("name", fedemb.__all__)
def test_every_public_name_is_there_and_documented(name):
    found = getattr(fedemb, name)
    assert getattr(fedemb, name) is found
    assert name == "MechanismConfig" or found.__doc__


def test_readme_shows_the_example_and_at_most_25_lines():
    code = lines_of_readme()
    assert code == (REPOSITORY / "docs" / "examples" / "quickstart.py").read_text()
    assert len([line for line in code.splitlines() if line]) <= 25


@pytest.mark.long
def test_lines_of_readme_print_what_privacy_costs():
    """Real training, each time with other noise and coins."""
    printed, names = io.StringIO(), {}
    with contextlib.redirect_stdout(printed):
        exec(compile(lines_of_readme(), "README.md", "exec"), names)
    lines = printed.getvalue().splitlines()
    found = dict(re.findall(r"^(.*): (\d\.\d+) \[", printed.getvalue(), re.MULTILINE))
    assert list(found) == ["without training", "private", "without privacy"]
    before, private, without = map(float, found.values())
    assert before + 0.05 < min(private, without)
    assert lines[2].startswith("simulation, not to be released: (7.889, ")
    assert "epsilon is infinite" in lines[4]
