"""`fedemb plan` from numbers and from a file."""

import json
import re
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from fedemb.errors import ConfigError
from fedemb.pipelines.cli.plan import plan


def app_of(command):
    app = typer.Typer()
    app.command()(command)
    return app


app = app_of(plan)
METHOD = Path(__file__).parents[2] / "docs" / "explanation" / "method.md"

NUMBERS = ["--population", "20000", "--clients-per-round", "10", "--rounds", "20"]


def call(tmp_path, *arguments):
    return invoke(app, *arguments, "--output", str(tmp_path / "p.json"))


def invoke(app, *arguments):
    result = CliRunner().invoke(app, arguments)
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def test_settings_of_a_plan_from_numbers_can_be_changed(tmp_path):
    changed = ("--set", "policy.certify_at=[90000]", "--set", "mechanism.l2_norm_clip=2")
    out = json.loads(call(tmp_path, *NUMBERS, "--noise-multiplier", "4", *changed, "--json"))
    (projection,) = out["projections"]
    assert (projection["simulated_at"], projection["population"]) == (20_000, 90_000)


def test_target_epsilon_finds_the_noise(tmp_path):
    out = json.loads(call(tmp_path, *NUMBERS, "--target-epsilon", "0.4", "--json"))
    assert 0.39 < out["epsilon"] <= 0.4


TREE = (
    "{kind: tree_aggregation, rounds: 20, clients_per_round: 10, noise_multiplier: 9, "
    "min_separation: 20, max_participations: 1}"
)


@pytest.mark.parametrize("kind", ["tree_aggregation", "not_private"])
def test_mechanisms_are_priced_from_a_configuration(tmp_path, kind):
    """Only real prices are printed; without noise no guarantee is printed."""
    changed = (
        TREE
        if kind == "tree_aggregation"
        else "{kind: not_private, rounds: 20, sampling_probability: 0.1}"
    )
    words = ("--config", "quickstart", "--set", f"mechanism={changed}")
    out = json.loads(call(tmp_path, *words, "--json"))
    assert out["mechanism"] == kind
    assert (out["epsilon"] is None) == (kind == "not_private")
    assert (out["zcdp_rho"] is None) == (kind != "tree_aggregation")
    said = call(tmp_path, *words)
    assert ("the gate denies it" in said) == (kind == "not_private")
    assert ("virtual clients a round in turn" in said) == (kind == "tree_aggregation")


def test_plan_prices_the_poster_as_its_page_says(tmp_path):
    (line,) = re.findall("fedemb plan (.*1.28.*)", METHOD.read_text())
    assert json.loads(call(tmp_path, *line.split(), "--json"))["epsilon"] == pytest.approx(
        3.03, abs=5e-3
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--noise-multiplier", "4"], "--clients-per-round, --population, --rounds"),
        (NUMBERS, "exactly one of"),
        ([*NUMBERS, "--noise-multiplier", "4", "--target-epsilon", "2"], "exactly one of"),
        ([*NUMBERS, "--noise-multiplier", "4", "--delta", "0.01"], "population 99\\."),
        ([*NUMBERS, "--noise-multiplier", "4", "--delta", "5e-5"], "population 19999\\."),
        ([*NUMBERS, "--noise-multiplier", "0"], "noise_multiplier"),
        ([*NUMBERS, "--noise-multiplier", "nan"], "noise_multiplier"),
        ([*NUMBERS, "--target-epsilon", "-1"], "target_epsilon"),
        (
            [*NUMBERS[:2], "--clients-per-round", "700", *NUMBERS[4:], "--noise-multiplier", "4"],
            "625 virtual clients",
        ),
    ],
)
def test_what_is_missing_or_wrong_is_said(tmp_path, arguments, words):
    with pytest.raises(ConfigError, match=words):
        call(tmp_path, *arguments)


def test_a_configuration_is_priced_as_the_run_would_be(tmp_path):
    overrides = ["--set", "mechanism.rounds=5", "--set", "mechanism.noise_multiplier=3"]
    out = json.loads(call(tmp_path, "--config", "quickstart", *overrides, "--json"))
    assert out["rounds"] == 5
    assert out["noise_multiplier"] == 3


@pytest.mark.parametrize("delta", [1e-7, 3e-7, 1e-3])
def test_suggested_bound_and_delta_are_accepted(tmp_path, delta):
    numbers = ["--population", "10000000", *NUMBERS[2:], "--noise-multiplier", "4"]
    with pytest.raises(ConfigError) as refused:
        call(tmp_path, *numbers, "--delta", str(delta))
    suggested = re.findall(r"(--[a-z-]+) ([\d.e-]*\d)", str(refused.value).partition("Pass")[2])
    assert [option for option, _ in suggested] == ["--delta", "--population"]
    for option, value in suggested:
        kept = [] if option == "--delta" else ["--delta", str(delta)]
        call(tmp_path, *numbers, *kept, option, value)
