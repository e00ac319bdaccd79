"""How many files of the product it takes to add something: one."""

import sys
import textwrap

import numpy as np
import pytest
from pydantic import NonNegativeFloat, create_model

import fedemb
from fedemb.config import RunConfig, ServerConfig, TrainingConfig
from fedemb.embedding import backbones
from fedemb.embedding.backbones import registry
from fedemb.errors import ConfigError
from fedemb.pipelines.cli import describe_config
from fedemb.pipelines.run import load_config

TOY = '''
from fedemb.embedding.backbones.blocks import embedding, layers
from fedemb.embedding.backbones.registry import backbone


@backbone("toy")
def toy(x, model):
    """One dense layer."""
    return embedding(layers().Flatten(name="flatten")(x), model)
'''


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """A module laid beside those of the backbones, and nothing else."""
    (tmp_path / "toy.py").write_text(textwrap.dedent(TOY))
    monkeypatch.setattr(backbones, "__path__", [*backbones.__path__, str(tmp_path)])
    registry.backbones.cache_clear()
    yield
    registry.backbones.cache_clear()
    registry._FOUND.pop("toy", None)
    sys.modules.pop("fedemb.embedding.backbones.toy", None)


def test_a_backbone_is_one_module(toy):
    images = np.random.default_rng(0).integers(0, 256, (40, 8, 8, 1), np.uint8)
    people = np.arange(40) // 2
    simulation = fedemb.Simulation(
        model=fedemb.ModelConfig(backbone="toy", image_size=8, embedding_dim=4),
        mechanism=fedemb.NotPrivateConfig(kind="not_private", rounds=1, sampling_probability=1.0),
        virtual_clients=2,
    )
    result = simulation.train(images, people, people)
    assert result.model.name == "toy"
    assert result.embed(images).shape == (40, 4)
    with pytest.raises(ConfigError, match="tiny, toy"):  # it stands in the list of the others
        fedemb.build_backbone(fedemb.ModelConfig(backbone="tow"), seed=0)


def test_a_setting_is_one_field(monkeypatch):
    """Schema, help, `--set`, bounds and sentences of errors follow from the class."""
    field = (NonNegativeFloat, 0.25)
    server = create_model("ServerConfig", __base__=ServerConfig, sharpness=field)
    training = create_model("TrainingConfig", __base__=TrainingConfig, server=(server, server()))
    whole = create_model("RunConfig", __base__=RunConfig, training=(training, training()))
    monkeypatch.setattr(describe_config, "RunConfig", whole)
    monkeypatch.setattr(load_config, "RunConfig", whole)
    lines = list(describe_config.describe("training"))
    assert "training.server.sharpness (number >= 0, default 0.25): " in lines
    config = load_config.load_config("quickstart", ["training.server.sharpness=0.5"])
    assert config.training.server.sharpness == 0.5
    assert config.updated({"training.server.sharpness": 1}).training.server.sharpness == 1
    with pytest.raises(ConfigError, match=r"training.server.sharpness: .* got -1"):
        load_config.load_config("quickstart", ["training.server.sharpness=-1"])
    with pytest.raises(ConfigError, match="did you mean sharpness"):
        load_config.load_config("quickstart", ["training.server.sharpnes=1"])
