"""The parameters of a pipeline say the whole configuration, each part of it once."""

import pytest
from google.protobuf import json_format

from fedemb.config import RunConfig
from fedemb.config.parameters import PARAMETERS, STORES, parameters_of, public_start, run_config
from fedemb.errors import ConfigError
from fedemb.pipelines.graph import build_pipeline
from fedemb.pipelines.run.load_config import PRESETS, load_config
from fedemb.pipelines.steps import PIPELINES

STORE = {name: f"gs://here/{name}" for name in STORES}


def preset(name: str) -> RunConfig:
    return load_config(name, [])


@pytest.mark.parametrize("name", sorted(path.stem for path in PRESETS.glob("*.yaml")))
def test_what_a_pipeline_is_given_makes_the_same_configuration(name):
    config = preset(name).updated({"storage.rollback_anchor": "gs://anchor"})
    given = {**parameters_of(config), **STORE}
    assert run_config(given) == config
    assert public_start(given) == config.public_start()
    for key, value in given.items():
        assert isinstance(value, PARAMETERS[key].type), key


def test_null_and_whole_numbers_survive():
    config = preset("quickstart").updated(
        {"release.min_gain_over_public": None, "pretraining.augmentation": None}
    )
    again = run_config({**parameters_of(config), **STORE})
    assert again.release.min_gain_over_public is None
    assert again.pretraining.augmentation is None
    assert isinstance(again.mechanism.rounds, int)


@pytest.mark.parametrize("pipeline", PIPELINES, ids=lambda pipeline: pipeline.name)
def test_both_pipelines_show_every_parameter_with_its_description_and_default(pipeline):
    spec = json_format.MessageToDict(build_pipeline(pipeline).pipeline_spec)
    shown = spec["root"]["inputDefinitions"]["parameters"]
    assert set(shown) == set(PARAMETERS)
    for name, item in PARAMETERS.items():
        assert shown[name]["description"] == item.description != ""
        assert shown[name].get("defaultValue") == item.default
    assert not {"config", "public_start"} & set(shown), "one text beside its own parts"


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
def test_what_is_no_configuration_is_refused_with_a_sentence(name, value, sentence):
    given = {**parameters_of(preset("quickstart")), **STORE, name: value}
    with pytest.raises(ConfigError, match=sentence):
        run_config(given)
