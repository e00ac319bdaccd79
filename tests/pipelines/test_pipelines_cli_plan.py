"""`fedemb plan` from numbers and from a file."""

import json
import math
import re
from functools import cache

import pytest
import typer
from typer.testing import CliRunner

from fedemb.errors import ConfigError
from fedemb.pipelines.cli.planning.extrapolate import extrapolate
from fedemb.pipelines.cli.planning.frontier import frontier as frontier_command
from fedemb.pipelines.cli.planning.plan import plan
from fedemb.pipelines.run.load_config import load_config, overridden
from fedemb.privacy.planning import frontier


def app_of(command):
    app = typer.Typer()
    app.command()(command)
    return app


app = app_of(plan)

NUMBERS = ["--population", "20000", "--clients-per-round", "10", "--rounds", "20"]
FIELDS = {
    "epsilon",
    "epsilon_conservative_2c",
    "epsilon_rdp",
    "noise_multiplier",
    "sampling_probability",
    "zcdp_rho",
    "delta",
    "mechanism",
    "accountant",
}


ALONE = (
    "poisson_gaussian",
    "random_allocation",
    "capped_image_poisson",
    "least_squares",
    "covariance",
)


@pytest.mark.parametrize("kind", ALONE)
def test_every_way_to_sample_units_alone_is_priced_from_numbers(tmp_path, kind):
    rounds = "1" if kind in ALONE[3:] else "20"
    numbers = ["--population", "20000", "--users-per-client", "1", "--clients-per-round", "1000"]
    words = ["--mechanism", kind, "--rounds", rounds, "--noise-multiplier", "4", "--json"]
    found = json.loads(call(tmp_path, *numbers, *words))
    assert found["mechanism"] == kind
    assert 0 < found["epsilon"] < 8


def call(tmp_path, *arguments):
    return invoke(app, *arguments, "--output", str(tmp_path / "p.json"))


def invoke(app, *arguments):
    result = CliRunner().invoke(app, arguments)
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def test_json_holds_the_promised_fields_and_the_file_is_written(tmp_path):
    out = json.loads(call(tmp_path, *NUMBERS, "--noise-multiplier", "4", "--json"))
    assert out.keys() >= FIELDS
    assert out["sampling_probability"] == 10 / 625
    assert out["delta"] == pytest.approx(20_000**-1.1)
    assert 0 < out["epsilon"] < out["epsilon_rdp"]
    assert out["epsilon"] < out["epsilon_conservative_2c"]
    written = json.loads((tmp_path / "p.json").read_text())
    assert written["guarantee"]["epsilon"] == out["epsilon"]
    assert written["users_lower_bound"] == 20_000


def test_population_bound_and_groups_can_be_set_apart(tmp_path):
    out = json.loads(
        call(
            tmp_path, *NUMBERS[2:], "--virtual-clients", "500", "--users-lower-bound", "9000",
            "--certify-at", "90000", "--noise-multiplier", "4", "--json",
        )
    )  # fmt: skip
    assert out["virtual_clients"] == 500
    assert out["users_lower_bound"] == 9000
    (projection,) = out["projections"]
    assert (projection["simulated_at"], projection["population"]) == (9000, 90_000)


def test_target_epsilon_finds_the_noise(tmp_path):
    out = json.loads(call(tmp_path, *NUMBERS, "--target-epsilon", "0.4", "--json"))
    assert 0.39 < out["epsilon"] <= 0.4


@pytest.mark.parametrize("kind", ["user_poisson", "fixed_size", "tree_aggregation", "not_private"])
def test_every_mechanism_is_planned_from_numbers(tmp_path, kind):
    noise = [] if kind == "not_private" else ["--noise-multiplier", "12"]
    out = json.loads(call(tmp_path, *NUMBERS, *noise, "--mechanism", kind, "--json"))
    assert out["mechanism"] == kind
    assert (out["epsilon"] is None) == (kind == "not_private")
    assert (out["zcdp_rho"] is None) == (kind != "tree_aggregation")


def test_words_and_sentence(tmp_path):
    out = call(
        tmp_path, *NUMBERS, "--noise-multiplier", "4", "--explain", "--delta", "3e-5",
    )  # fmt: skip
    for word in ("one user", "Unit.", "Adjacency.", "Sampler.", "Accountant."):
        assert word in out
    assert "warning: delta=3e-05 is above the customary" in out


@pytest.mark.parametrize(
    ("preset", "said"),
    [
        ("quickstart", "A user that changes all of their own data is also covered."),
        ("omniglot_identities", "A user that changes all of their own data is not covered."),
    ],
)
def test_words_say_whether_a_changed_user_is_covered_as_the_report_does(tmp_path, preset, said):
    """Where a column decides who is held out, another value moves a user there."""
    words = call(tmp_path, "--config", preset, "--explain")
    assert said in " ".join(words.split())


def test_extrapolation_draws_one_curve_per_mechanism(tmp_path):
    drawing = app_of(extrapolate)
    arguments = (*NUMBERS, "--noise-multiplier", "4", "--figure", str(tmp_path / "f.svg"))
    whole = json.loads(invoke(drawing, *arguments, "--json"))
    out = whole["extrapolation"]
    assert out["population"][0]["epsilon"] == whole["epsilon"]
    for axis in ("population", "compute"):
        for kind in ("group_poisson_gaussian", "user_poisson", "fixed_size", "tree_aggregation"):
            curve = [point for point in out[axis] if point["mechanism"] == kind]
            assert len(curve) >= 4
            assert all(math.isfinite(point["epsilon"]) for point in curve)
    svg = (tmp_path / "f.svg").read_bytes()
    assert svg.count(b"Projections, not guarantees") == 1
    # One curve for two mechanisms of one price, and its label says so.
    assert b"user poisson = fixed size" in svg
    text = invoke(drawing, *arguments)
    assert (tmp_path / "f.svg").read_bytes() == svg
    assert f"{whole['epsilon']:#.3g} (noise 4)" in text


def test_words_say_no_more_than_there_is(tmp_path):
    """Only real prices are printed; without noise no guarantee is printed."""
    users = call(tmp_path, *NUMBERS, "--mechanism", "user_poisson", "--noise-multiplier", "9")
    assert "2C" not in users
    assert "users drawn with probability 0.016" in users
    tree = call(tmp_path, *NUMBERS, "--mechanism", "tree_aggregation", "--noise-multiplier", "9")
    assert "10 of 625 virtual clients a round in turn" in tree
    nothing = call(tmp_path, *NUMBERS, "--mechanism", "not_private", "--explain")
    assert "protected" not in nothing
    assert "Adjacency" not in nothing
    assert "the gate denies it" in nothing


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--noise-multiplier", "4"], "--population, --clients-per-round, --rounds"),
        (NUMBERS, "exactly one of"),
        ([*NUMBERS, "--noise-multiplier", "4", "--target-epsilon", "2"], "exactly one of"),
        ([*NUMBERS, "--noise-multiplier", "4", "--delta", "0.01"], "users-lower-bound 99\\."),
        ([*NUMBERS, "--noise-multiplier", "4", "--delta", "5e-5"], "users-lower-bound 19999\\."),
        ([*NUMBERS, "--noise-multiplier", "0"], "noise_multiplier"),
        ([*NUMBERS, "--noise-multiplier", "nan"], "noise_multiplier"),
        ([*NUMBERS, "--target-epsilon", "-1"], "target_epsilon"),
        ([*NUMBERS, "--noise-multiplier", "4", "--buffers", "3"], "--buffers is for blt"),
        (
            [*NUMBERS, "--noise-multiplier", "4", "--min-separation", "3"],
            "tree_aggregation and blt",
        ),
        ([*NUMBERS, "--mechanism", "not_private", "--noise-multiplier", "4"], "no noise"),
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


def test_renyi_is_called_looser_only_where_it_is(tmp_path):
    base = ["--mechanism", "poisson_gaussian", "--population", "50000", "--users-per-client", "1"]
    base += ["--clients-per-round", "40", "--rounds", "2", "--delta", "1e-5"]
    for noise in ("1", "49000"):
        found = json.loads(call(tmp_path, *base, "--noise-multiplier", noise, "--json"))
        looser = "Renyi accountant, looser" in call(tmp_path, *base, "--noise-multiplier", noise)
        assert looser == (found["epsilon_rdp"] > found["epsilon"])
    assert not looser


@pytest.mark.long
@pytest.mark.parametrize("preset", ["dp_sgd_quickstart", "quickstart", "cifar10_scatter"])
def test_a_simulation_that_is_planned_is_the_one_that_is_written(tmp_path, preset):
    path, asked = tmp_path / "small.yaml", ("--config", preset, "--simulate-at", "1/2")
    out = json.loads(call(tmp_path, *asked, "--write", str(path), "--json"))
    whole, small = load_config(preset), load_config(path)
    assert small == overridden(whole, out["simulation"]["settings"])
    assert small.purpose == "simulation"
    assert out["noise_multiplier"] == whole.mechanism.noise_multiplier
    priced = json.loads(call(tmp_path, "--config", str(path), "--json"))
    assert priced["noise_multiplier"] == out["noise_multiplier"] / 2
    assert priced["noise_multiplier"] / priced["clients_per_round"] == pytest.approx(
        out["simulation"]["noise_per_batch"]
    )
    assert priced["rounds"] == out["rounds"]


def test_a_simulation_without_a_batch_to_scale_is_refused_and_nothing_written(tmp_path):
    path = tmp_path / "small.yaml"
    for preset, words in (
        ("cifar10_least_squares", "use all units"),
        ("quickstart", "leave at least"),
    ):
        share = "1/16" if preset != "quickstart" else "1/1000"
        with pytest.raises(ConfigError, match=words):
            call(tmp_path, "--config", preset, "--simulate-at", share, "--write", str(path))
    assert not path.exists()


@pytest.mark.long
def test_frontier_estimates_minutes_where_the_speed_is_given(tmp_path, monkeypatch):
    """Batch x rounds / units a second, in the table and in the JSON."""
    monkeypatch.setattr(frontier, "upper_bound", cache(frontier.upper_bound))  # drawn three times
    arguments = ["--mechanism", "poisson_gaussian", "--population", "2000"]
    arguments += ["--users-per-client", "1", "--clients-per-round", "200", "--rounds", "20"]
    arguments += ["--target-epsilon", "0.5", "--delta", "1e-4"]
    arguments += ["--figure", str(tmp_path / "f.svg")]
    timed = [*arguments, "--units-per-second", "50"]
    drawing = app_of(frontier_command)
    for point in json.loads(invoke(drawing, *timed, "--json"))["frontier"]["points"]:
        assert point["minutes"] == pytest.approx(point["batch"] * point["rounds"] / 3000)
    assert "minutes" in invoke(drawing, *timed)
    assert "minutes" not in invoke(drawing, *arguments)


def test_frontier_and_extrapolate_refuse_plans_they_cannot_draw():
    with pytest.raises(ConfigError, match="--target-epsilon"):
        invoke(app_of(frontier_command), *NUMBERS, "--noise-multiplier", "4")
    with pytest.raises(ConfigError, match="not_private adds no noise"):
        invoke(app_of(extrapolate), *NUMBERS, "--mechanism", "not_private")


def test_options_of_a_group_reach_the_command_once():
    """The options of plan commands are the fields of their groups, each declared once."""
    names = [parameter.name for parameter in typer.main.get_command(app).params]
    assert len(names) == len(set(names))
    assert {"config", "population", "simulate_at", "explain"} <= set(names)


@pytest.mark.parametrize("delta", [1e-7, 3e-7, 1e-3, 0.4])
def test_suggested_bound_and_delta_are_accepted(tmp_path, delta):
    numbers = ["--population", "10000000", *NUMBERS[2:], "--noise-multiplier", "4"]
    with pytest.raises(ConfigError) as refused:
        call(tmp_path, *numbers, "--delta", str(delta))
    suggested = re.findall(r"(--[a-z-]+) ([\d.e-]*\d)", str(refused.value).partition("Pass")[2])
    assert [option for option, _ in suggested] == ["--delta", "--users-lower-bound"]
    for option, value in suggested:
        kept = [] if option == "--delta" else ["--delta", str(delta)]
        call(tmp_path, *numbers, *kept, option, value)
