"""`fedemb plan`."""

import json
import re
from pathlib import Path

import pytest

from fedemb.errors import ConfigError
from tests.kit.cli import fedemb

METHOD = Path(__file__).parents[2] / "docs" / "explanation" / "method.md"


def call(*arguments):
    return fedemb("plan", *arguments)


def test_projection_states_simulated_and_projected_population():
    out = json.loads(call("--set", "policy.certify_at=[90000]", "--json"))
    (projection,) = out["projections"]
    assert (projection["simulated_at"], projection["population"]) == (28_000, 90_000)


def test_target_epsilon_finds_the_noise():
    out = json.loads(call("--target-epsilon", "0.4", "--json"))
    assert 0.39 < out["epsilon"] <= 0.4


TREE = "mechanism={kind: tree_aggregation, rounds: 20, clients_per_round: 10, noise_multiplier: 9}"


@pytest.mark.parametrize("changed", [TREE, "mechanism.noise_multiplier=0"])
def test_mechanisms_are_priced_from_a_configuration(changed):
    """Only real prices are printed; without noise no guarantee is printed."""
    words = ("--config", "quickstart", "--set", changed, "--set", "purpose=simulation")
    out = json.loads(call(*words, "--json"))
    assert (out["epsilon"] is None) == (changed != TREE)
    assert (out["zcdp_rho"] is None) == (changed != TREE)
    said = call(*words)
    assert ("the gate denies it" in said) == (changed != TREE)
    assert ("virtual clients a round in turn" in said) == (changed == TREE)


def test_plan_command_of_the_method_page_prints_its_epsilon():
    (line,) = re.findall("fedemb plan (.*1.28.*)", METHOD.read_text())
    assert json.loads(call(*line.split(), "--json"))["epsilon"] == pytest.approx(3.03, abs=5e-3)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--set", "mechanism.noise_multiplier=-1"], "noise_multiplier"),
        (["--set", "mechanism.noise_multiplier=.nan"], "noise_multiplier"),
        (["--target-epsilon", "-1"], "target_epsilon"),
        (["--set", "mechanism.rounds=100000", "--target-epsilon", "1e-9"], "epsilon"),
    ],
)
def test_plan_refuses_invalid_noise_and_epsilon(arguments, words):
    with pytest.raises(ConfigError, match=words):
        call(*arguments)


def test_plan_applies_overrides_of_rounds_and_noise():
    overrides = ["--set", "mechanism.rounds=5", "--set", "mechanism.noise_multiplier=3"]
    out = json.loads(call("--config", "quickstart", *overrides, "--json"))
    assert out["rounds"] == 5
    assert out["noise_multiplier"] == 3
