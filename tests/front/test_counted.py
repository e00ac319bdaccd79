"""How many files of the product it takes to add something: one, and a line where it is listed."""

import re
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from dp_accounting import dp_event as dpe
from pydantic import NonNegativeFloat, create_model

import fedemb
from fedemb.config import RunConfig, ServerConfig, TrainingConfig
from fedemb.errors import ConfigError
from fedemb.foundation.section import Probability
from fedemb.pipelines.cli import config_text
from fedemb.pipelines.run import load_config
from fedemb.privacy.mechanisms.mechanism import MechanismPlan
from fedemb.privacy.mechanisms.registry import MECHANISMS
from fedemb.privacy.mechanisms.section import NoisedConfig
from tests.kit import privacy_worlds
from tests.kit.privacy_worlds import ROOT, World, make_plan

TOY = '''
import keras


def build(model):
    """One dense layer."""
    images = keras.Input((model.image_size, model.image_size, model.channels))
    flat = keras.layers.Flatten()(images)
    return keras.Model(images, keras.layers.Dense(model.embedding_dim)(flat), name="toy")
'''


def test_a_backbone_is_one_function(tmp_path, monkeypatch):
    (tmp_path / "toy.py").write_text(TOY)
    monkeypatch.syspath_prepend(tmp_path)
    images = np.random.default_rng(0).integers(0, 256, (40, 8, 8, 1), np.uint8)
    people = np.arange(40) // 2
    simulation = fedemb.Simulation(
        model=fedemb.ModelConfig(backbone="toy:build", image_size=8, embedding_dim=4),
        mechanism=fedemb.NotPrivateConfig(kind="not_private", rounds=1, sampling_probability=1.0),
        virtual_clients=2,
    )
    result = simulation.train(images, people, people)
    assert result.model.name == "toy"
    assert result.embed(images).shape == (40, 4)


def test_a_setting_is_one_field(monkeypatch):
    """Schema, help, `--set`, bounds and sentences of errors follow from the class."""
    field = (NonNegativeFloat, 0.25)
    server = create_model("ServerConfig", __base__=ServerConfig, sharpness=field)
    training = create_model("TrainingConfig", __base__=TrainingConfig, server=(server, server()))
    whole = create_model("RunConfig", __base__=RunConfig, training=(training, training()))
    monkeypatch.setattr(config_text, "RunConfig", whole)
    monkeypatch.setattr(load_config, "RunConfig", whole)
    lines = list(config_text.describe("training"))
    assert "training.server.sharpness (number >= 0, default 0.25): " in lines
    config = load_config.load_config("quickstart", ["training.server.sharpness=0.5"])
    assert config.training.server.sharpness == 0.5
    assert config.updated({"training.server.sharpness": 1}).training.server.sharpness == 1
    with pytest.raises(ConfigError, match=r"training.server.sharpness: .* got -1"):
        load_config.load_config("quickstart", ["training.server.sharpness=-1"])
    with pytest.raises(ConfigError, match="did you mean sharpness"):
        load_config.load_config("quickstart", ["training.server.sharpnes=1"])


class HalvesConfig(NoisedConfig):
    """A field of its own, which no other mechanism has."""

    kind: Literal["halves"] = "halves"
    share: Probability
    """Chance of each virtual client."""


class Halves(HalvesConfig, MechanismPlan):
    section = HalvesConfig
    proof = "a user moves one update by at most 2C"
    weight: float

    @classmethod
    def derived(cls, section, numbers):
        return {"weight": section.share * numbers.virtual_clients}

    @property
    def normalizer(self):
        return self.weight

    def sample(self, round_key, round_index, index):
        from fedemb.privacy.randomness.sampling import sample_groups

        return sample_groups(self, self.share, round_key, round_index, index)

    @property
    def round_event(self):
        return dpe.GaussianDpEvent(self.noise_multiplier / 2)


def test_a_mechanism_is_one_module_and_a_line_of_the_registry(monkeypatch):
    """The world of the tests plans it as it plans itself: every test of all kinds takes it."""
    monkeypatch.setitem(MECHANISMS, "halves", Halves)
    plan = make_plan("halves", share=0.25, virtual_clients=20)
    assert (plan.share, plan.weight, plan.normalizer) == (0.25, 5.0, 5.0)
    assert len(plan.sampler(ROOT).sample(0, World(range(100), 20))) <= 20
    assert "(inf" not in str(fedemb.guarantee(plan, delta=1e-5))
    with pytest.raises(ConfigError, match="share"):
        make_plan("halves", share=2.0)


def test_the_world_of_the_tests_names_mechanisms_in_one_table_only():
    source = Path(privacy_worlds.__file__).read_text()
    table = source[source.index("OTHER_COHORTS = {") : source.index("a new mechanism needs")]
    named = re.findall(rf"\b({'|'.join(MECHANISMS)})\b", source.replace(table, ""))
    assert named == ["group_poisson_gaussian"]  # the default
