"""`fedemb tune`: the file of a search, and what a dry run says of its price."""

import json

import pytest
import yaml
from typer.testing import CliRunner

from fedemb.errors import ConfigError, InputError
from fedemb.pipelines.cli.main import app
from fedemb.pipelines.cli.tune import search_override
from fedemb.pipelines.run.load_config import load_config
from fedemb.privacy.mechanisms.registry import plan_mechanism
from fedemb.privacy.planning.prices import guarantee_of

SEARCH = {
    "mean_trials": 3,
    "law": "geometric",
    "recipes": {"narrow": {"mechanism.l2_norm_clip": 0.5}, "wide": {"mechanism.l2_norm_clip": 2}},
}


def written(folder, search):
    path = folder / "recipes.yaml"
    path.write_text(search if isinstance(search, str) else yaml.safe_dump(search))
    return path


def test_file_of_a_search_becomes_the_declaration_of_the_run(tmp_path):
    override = search_override(written(tmp_path, {**SEARCH, "method": "two clips"}))
    tuning = load_config("dp_sgd_quickstart", [override]).tuning
    assert (tuning.data, tuning.method) == ("search", "two clips")
    assert tuning.search.model_dump() == SEARCH
    named = search_override(written(tmp_path, SEARCH))
    assert json.loads(named.partition("=")[2])["method"] == "private search over 2 recipes"


def test_dry_run_prints_the_price_of_the_search_and_of_one_trial(tmp_path):
    path = written(tmp_path, SEARCH)
    words = ["tune", str(path), "-c", "dp_sgd_quickstart", "--dry-run"]
    said = CliRunner().invoke(app, [*words, "--runs", str(tmp_path / "runs")])
    assert said.exit_code == 0, said.output
    plan = plan_mechanism(load_config("dp_sgd_quickstart", [search_override(path)]))
    whole, one = (guarantee_of(p, 1e-5).epsilon for p in (plan, plan.replaced(search=None)))
    assert f"({whole:.4g}, 1e-05)-differential privacy" in said.output
    assert f"one trial alone would cost {one:.4g}" in said.output
    assert "trials: 3 on average (geometric law); half of all searches run at most 2" in said.output
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("search", "problem"),
    [
        ("- a\n", "is not a search"),
        ("mean_trials: [", "is not valid YAML"),
        ({"recipes": SEARCH["recipes"]}, "no recipes or no mean_trials"),
        ({**SEARCH, "trials": 3}, "has trials"),
        ({**SEARCH, "recipes": [1]}, "is not a search"),
    ],
)
def test_file_that_is_not_a_search_is_refused_in_a_sentence(tmp_path, search, problem):
    with pytest.raises(ConfigError, match=problem):
        search_override(written(tmp_path, search))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"mean_trials": 1}, "mean_trials"),
        ({"law": "fixed"}, "law"),
        ({"recipes": {"a": {}}}, "recipes"),
        ({"recipes": {"a": {}, "b": {"model.backbone": "tiny"}}}, "which all trials share"),
        ({"recipes": {"a": {}, "b": {"training.seed": 2}}}, "which all trials share"),
        ({"recipes": {"a": {}, "b": {"training.server.momentum": 2}}}, "recipe 'b'"),
        ({"recipes": {"a": {}, "b": {}}}, "the same settings"),
    ],
)
def test_search_that_cannot_run_is_refused_in_a_sentence(tmp_path, change, problem):
    override = search_override(written(tmp_path, {**SEARCH, **change}))
    with pytest.raises(ConfigError, match=problem) as caught:
        load_config("dp_sgd_quickstart", [override])
    assert "pydantic" not in str(caught.value)


def test_missing_file_is_named(tmp_path):
    with pytest.raises(InputError, match="cannot be read"):
        search_override(tmp_path / "none.yaml")
