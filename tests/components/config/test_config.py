"""The configuration refuses what cannot be, in a sentence, before anything runs."""

import json

import pytest
import yaml
from google.protobuf import json_format

from fedemb.config import RunConfig
from fedemb.config.parameters import PARAMETERS, STORES, backbone_config, parameters_of, run_config
from fedemb.errors import ConfigError
from fedemb.pipelines.graph import build_pipeline
from fedemb.pipelines.run.load_config import (
    PRESETS,
    load_config,
    overridden,
    preset_names,
    validate,
)
from fedemb.pipelines.steps import PIPELINE


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
def test_invalid_setting_is_refused_with_a_one_line_error(override, sentence):
    with pytest.raises(ConfigError, match=sentence) as caught:
        load_config("quickstart", [override])
    assert "\n" not in str(caught.value)
    assert "pydantic" not in str(caught.value)


UNIT = "training.unit_gradient"


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (f"{UNIT}.views=0", "views: input should be greater than or equal to 1, got 0"),
        (f"{UNIT}.images_per_unit=5", "images_per_unit=5 exceeds the 4 that one user can have"),
        (
            f"{UNIT}.microbatch=4096 policy.users_lower_bound=4000",
            "exceeds policy.users_lower_bound",
        ),
        ("mechanism.units_per_round=10501", "=10501 exceeds policy.users_lower_bound=10500"),
        ("mechanism.l2_norm_clip=0", "l2_norm_clip"),
        ("model.classes=[a,b,a]", "2 of them distinct"),
        ("model.classes=[]", "0 model.classes"),
        ("task=embedding", "an embedding has neither"),
        ("data.source.label_scope=user", "labels that mean the same for every user"),
        (f"model.trainable=head {UNIT}.views=2", "computes the features of an image once"),
        (f"{UNIT}.crop_padding=28", "must be below"),
    ],
)
def test_invalid_classifier_setting_is_refused_with_a_one_line_error(overrides, sentence):
    with pytest.raises(ConfigError, match=sentence) as caught:
        load_config("dp_sgd_quickstart", overrides.split(" "))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "version"),
    [("2", "2"), ("1.10", "1.10"), ("007", "007"), ("true", "true"), ("'3'", "3"), ("null", None)],
)
def test_text_setting_takes_a_number_as_it_is_typed(text, version):
    config = load_config("quickstart", [f"release.version={text}"])
    assert config.release.version == version
    assert overridden(config, [f"release.version={text}"]).release.version == version


def test_tree_aggregation_refuses_more_than_one_grouping():
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


def test_missing_mechanism_is_refused():
    tree = load_config("quickstart").model_dump(mode="json")
    del tree["mechanism"]
    with pytest.raises(ConfigError, match="mechanism is missing"):
        validate(tree)


def test_float_numbers_of_kfp_structs_become_integers_again():
    tree = load_config("quickstart").model_dump(mode="json")
    tree["mechanism"]["rounds"] = float(tree["mechanism"]["rounds"])
    assert validate(tree) == load_config("quickstart")


# ---- The parameters of a pipeline say the whole configuration, each part of it once ----


STORE = {name: f"gs://here/{name}" for name in STORES}


def preset(name: str) -> RunConfig:
    return load_config(name, [])


@pytest.mark.parametrize("name", sorted(path.stem for path in PRESETS.glob("*.yaml")))
def test_pipeline_parameters_rebuild_the_configuration(name):
    config = preset(name).updated({"storage.rollback_anchor": "gs://anchor"})
    given = {**parameters_of(config), **STORE}
    assert run_config(given) == config
    assert backbone_config(given) == config.backbone_config()
    for key, value in given.items():
        assert isinstance(value, PARAMETERS[key].type), key


def test_null_and_integer_settings_survive_pipeline_parameters():
    config = preset("quickstart").updated(
        {"release.min_gain_over_public": None, "pretraining.augmentation": None}
    )
    again = run_config({**parameters_of(config), **STORE})
    assert again.release.min_gain_over_public is None
    assert again.pretraining.augmentation is None
    assert isinstance(again.mechanism.rounds, int)


def test_the_pipeline_shows_every_parameter_with_its_description_and_default():
    spec = json_format.MessageToDict(build_pipeline(PIPELINE).pipeline_spec)
    shown = spec["root"]["inputDefinitions"]["parameters"]
    assert set(shown) == set(PARAMETERS)
    for name, item in PARAMETERS.items():
        assert shown[name]["description"] == item.description != ""
        assert shown[name].get("defaultValue") == item.default
    assert not {"config", "backbone_config"} & set(shown), "one text beside its own parts"


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("mechanism", "rounds: 3", "Parameter mechanism is not valid JSON"),
        ("policy", "[]", r"Parameter policy must be a JSON object, got '\[\]'"),
        ("partition", '{"virtual_clients": 0}', r"partition\.virtual_clients: .*greater than 0"),
        ("purpose", "publish", "purpose: "),
        ("training", '{"algorithm": "dp_sgd"}', "task=embedding"),
    ],
)
def test_invalid_pipeline_parameters_are_refused(name, value, sentence):
    given = {**parameters_of(preset("quickstart")), **STORE, name: value}
    with pytest.raises(ConfigError, match=sentence):
        run_config(given)


def test_updated_configuration_does_not_change_the_callers_values():
    by_hash = {"by": "hash", "fraction": 0.2}
    changed = {"partition.evaluation": by_hash, "partition.evaluation.fraction": 0.3}
    assert preset("quickstart").updated(changed).partition.evaluation.fraction == 0.3
    assert by_hash["fraction"] == 0.2
