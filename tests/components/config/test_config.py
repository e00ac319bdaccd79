"""The configuration refuses what cannot be, in a sentence, before anything runs."""

import json
from pathlib import Path

import pytest
import yaml

from fedemb.config import FREE_SECTIONS, RunConfig, TrainingConfig
from fedemb.config.digest import config_digest
from fedemb.config.parameters import STORES, parameters_of, run_config
from fedemb.errors import ConfigError
from fedemb.foundation.canonical_json import json_digest
from fedemb.pipelines.cli.describe_config import describe
from fedemb.pipelines.run.load_config import load_config, overridden, preset_names, validate
from fedemb.privacy.mechanisms.registry import plan_mechanism

GOLDEN = Path(__file__).parents[2] / "golden" / "run_config.schema.json"


@pytest.mark.parametrize("name", preset_names())
def test_preset_is_valid_and_survives_a_round_trip(name):
    config = load_config(name)
    assert RunConfig.model_validate(json.loads(config.model_dump_json())) == config
    assert validate(yaml.safe_load(yaml.safe_dump(config.model_dump(mode="json")))) == config


@pytest.mark.parametrize("name", preset_names())
def test_what_an_older_version_wrote_keeps_its_text_and_digest(name):
    """It lacks settings that came later, in sections of sections too; they are the defaults."""
    config = load_config(name)
    older = config.model_dump(mode="json")
    del older["training"]["backend"], older["model"]["mirrored"], older["data"]["max_pixels"]
    del older["training"]["server"]["weight_decay"], older["mechanism"]["l2_norm_clip"]

    read = RunConfig.as_written(older)
    assert read.model_dump(mode="json") == json.loads(read.model_dump_json()) == older
    bound = {part: value for part, value in older.items() if part not in FREE_SECTIONS}
    assert config_digest(read) == json_digest(bound) != config_digest(config)
    completed = validate(older)  # as people write it: what they leave out is written down
    assert completed == read
    assert completed.model_dump(mode="json").keys() == completed.model_fields.keys()
    assert completed.training.model_dump(mode="json").keys() == TrainingConfig.model_fields.keys()

    # No one who is handed a section changes how it is written.
    read.public_start()
    plan_mechanism(read)
    again = run_config({**parameters_of(read), **dict.fromkeys(STORES, "")})
    for unchanged in (read, again, RunConfig.as_written(json.loads(read.model_dump_json()))):
        assert config_digest(unchanged) == json_digest(bound)


def test_former_name_of_a_setting_is_read_with_one_warning(tmp_path, capsys):
    file = tmp_path / "old.yaml"
    tree = load_config("quickstart").model_dump(mode="json")
    del tree["storage"]["rollback_anchor"]
    tree["storage"]["witness"] = "/anchor"
    file.write_text(yaml.safe_dump(tree))
    config = load_config(file)
    assert config.storage.rollback_anchor == "/anchor"
    assert capsys.readouterr().err.splitlines() == [
        "warning: storage.witness is the former name of storage.rollback_anchor; use "
        "storage.rollback_anchor"
    ]
    with pytest.raises(ConfigError, match="former name of rollback_anchor; set only"):
        load_config(file, ["storage.rollback_anchor=/another"])


@pytest.mark.parametrize("anchor", [None, "/anchor"])
def test_former_name_of_a_setting_stays_in_what_a_run_wrote(anchor, capsys):
    older = load_config("quickstart").model_dump(mode="json")
    del older["storage"]["rollback_anchor"]
    older["storage"]["witness"] = anchor
    read = RunConfig.as_written(older)
    assert read.storage.rollback_anchor == anchor
    assert read.model_dump(mode="json") == older, "its digest does not change"
    assert capsys.readouterr().err == "", "written configurations cause no warning"
    changed = read.updated({"mechanism.rounds": 3})
    assert changed.storage.rollback_anchor == anchor
    assert "witness" not in changed.model_dump(mode="json")["storage"]


def test_schema_is_the_golden_one(request):
    text = json.dumps(RunConfig.model_json_schema(), indent=1, sort_keys=True) + "\n"
    if request.config.getoption("--force-regen", default=False):
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text(), "the schema changed; review with `make golden`"


def test_every_setting_has_words():
    assert [line for line in describe() if line.endswith("): ")] == []


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("mechanism.noise_multiplyer=1", "did you mean noise_multiplier"),
        ("mechanism.noise_multiplier=.nan", "finite number"),
        ("mechanism.noise_multiplier=0", "greater than or equal to 0.001"),
        ("mechanism.sampling_probability=1.5", "less than or equal to 1"),
        ("mechanism.sampling_probability=0", "greater than 0"),
        ("policy.delta=0.5", "below 1/users_lower_bound"),
        ("policy.delta=1e-400", "greater than 0"),
        ("training.algorithm=centralized", "not allowed in a release"),
        ("evaluation.centralized_baseline=true", "purpose: simulation"),
        ("purpose=relaese", "'release' or 'simulation'"),
        ("pretraining.kind=import", "Set pretraining.import_path"),
        ("partition.virtual_clients=0", "greater than 0"),
        ("model.channels=2", "1 or 3"),
        ("tuning={data: private, method: a grid}", "contradict each other"),
        ("tuning={data: public, method: a grid, trials: 3}", "contradict each other"),
        ("tuning={}", "tuning.data is not set"),
        ("tuning={data: public}", "Set both or neither"),
        ("tuning={method: a grid}", "Set both or neither"),
        ("training.server.other_ema_decays=[0.5]", "got training.algorithm=dp_fedemb; leave it"),
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


def test_text_setting_takes_no_list():
    with pytest.raises(ConfigError, match=r"release\.version: input should be a valid string"):
        load_config("quickstart", ["release.version=[1]"])


def test_regroupings_are_refused_where_participation_is_tracked():
    tree = load_config("quickstart").model_dump(mode="json")
    tree["partition"]["groupings"] = 3
    tree["mechanism"] = {
        "kind": "tree_aggregation",
        "rounds": 10,
        "noise_multiplier": 4.0,
        "clients_per_round": 10,
        "min_separation": 2,
        "max_participations": 3,
    }
    with pytest.raises(ConfigError, match="groupings must be 1"):
        validate(tree)


def test_mechanism_is_never_the_default():
    tree = load_config("quickstart").model_dump(mode="json")
    del tree["mechanism"]
    with pytest.raises(ConfigError, match="mechanism is missing"):
        validate(tree)


def test_missing_file_names_the_presets():
    with pytest.raises(ConfigError, match="fedemb config presets"):
        load_config("no_such_preset")


def test_override_reaches_into_sections():
    config = load_config("quickstart", ["mechanism.rounds=3", "policy.delta=1e-6"])
    assert config.mechanism.rounds == 3
    assert config.policy.delta == 1e-6


def test_float_numbers_of_kfp_structs_become_integers_again():
    tree = load_config("quickstart").model_dump(mode="json")
    tree["mechanism"]["rounds"] = float(tree["mechanism"]["rounds"])
    assert validate(tree) == load_config("quickstart")
