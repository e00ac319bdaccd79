"""The configuration refuses what cannot be, in a sentence, before anything runs."""

import json

import pytest
import yaml

from fedemb.config import RunConfig
from fedemb.errors import ConfigError
from fedemb.pipelines.run.load_config import load_config, overridden, preset_names, validate


@pytest.mark.parametrize("name", preset_names())
def test_preset_is_valid_and_survives_a_round_trip(name):
    config = load_config(name)
    assert RunConfig.model_validate(json.loads(config.model_dump_json())) == config
    assert validate(yaml.safe_load(yaml.safe_dump(config.model_dump(mode="json")))) == config


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("mechanism.noise_multiplyer=1", "did you mean noise_multiplier"),
        ("mechanism.noise_multiplier=.nan", "finite number"),
        ("mechanism.noise_multiplier=0", "not allowed in a release"),
        ("mechanism.noise_multiplier=1e-4", "set 0 or at least 0.001"),
        ("mechanism.sampling_probability=1.5", "less than or equal to 1"),
        ("mechanism.sampling_probability=0", "greater than 0"),
        ("policy.delta=0.5", "below 1/users_lower_bound"),
        ("policy.delta=1e-400", "greater than 0"),
        ("evaluation.centralized_baseline=true", "purpose: simulation"),
        ("purpose=relaese", "'release' or 'simulation'"),
        ("pretraining.kind=import", "Set pretraining.import_path"),
        ("partition.virtual_clients=0", "greater than 0"),
        ("model.channels=2", "1 or 3"),
        ("tuning={data: private, method: a grid}", "contradict each other"),
        ("tuning={data: public, method: a grid, private_runs: 3}", "contradict each other"),
        ("tuning={}", "tuning.data is not set"),
        ("tuning={data: public}", "Set both or neither"),
        ("tuning={method: a grid}", "Set both or neither"),
        ("nonsense", "Pass KEY=VALUE"),
        ("mechanism={kind: nothing}", "mechanism"),
    ],
)
def test_wrong_setting_is_one_sentence(override, sentence):
    with pytest.raises(ConfigError, match=sentence) as caught:
        load_config("quickstart", [override])
    assert "\n" not in str(caught.value)
    assert "pydantic" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "version"),
    [("2", "2"), ("1.10", "1.10"), ("007", "007"), ("true", "true"), ("'3'", "3"), ("null", None)],
)
def test_text_setting_takes_a_number_as_it_is_typed(text, version):
    config = load_config("quickstart", [f"release.version={text}"])
    assert config.release.version == version
    assert overridden(config, [f"release.version={text}"]).release.version == version


def test_regroupings_are_refused_where_participation_is_tracked():
    tree = load_config("quickstart").model_dump(mode="json")
    tree["partition"]["groupings"] = 3
    tree["mechanism"] = {
        "kind": "tree_aggregation",
        "rounds": 10,
        "noise_multiplier": 4.0,
        "clients_per_round": 10,
    }
    with pytest.raises(ConfigError, match="groupings must be 1"):
        validate(tree)


def test_mechanism_is_never_the_default():
    tree = load_config("quickstart").model_dump(mode="json")
    del tree["mechanism"]
    with pytest.raises(ConfigError, match="mechanism is missing"):
        validate(tree)


def test_float_numbers_of_kfp_structs_become_integers_again():
    tree = load_config("quickstart").model_dump(mode="json")
    tree["mechanism"]["rounds"] = float(tree["mechanism"]["rounds"])
    assert validate(tree) == load_config("quickstart")
