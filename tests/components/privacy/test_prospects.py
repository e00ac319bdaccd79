"""Plans with hopeless noise are refused before the charge, unless the configuration gives a reason."""

from __future__ import annotations

import math

import pytest

from fedemb.errors import Refused
from fedemb.models.backbones import build_backbone
from fedemb.pipelines.run.load_config import load_config
from fedemb.privacy.mechanisms.registry import plan_mechanism
from fedemb.steps.plan_privacy.prospects import (
    REGIONS,
    WEIGHTS,
    check_prospects,
    prospects,
    users_needed,
)


def with_noise(preset: str, noise: float, **settings: object):
    """A preset whose noise, in the unit of `REGIONS`, is `noise`."""
    config = load_config(preset).updated(settings)
    found = prospects(config, plan_mechanism(config))
    assert found is not None
    multiplier = config.mechanism.noise_multiplier * noise / found.noise
    return config.updated({"mechanism.noise_multiplier": multiplier})


@pytest.mark.parametrize(
    ("preset", "recipe"), [("quickstart", "whole_net"), ("dp_sgd_quickstart", "classifier")]
)
def test_release_with_hopeless_noise_is_refused_unless_a_reason_is_given(preset, recipe):
    limit = REGIONS[recipe].hopeless
    check_prospects(with_noise(preset, 0.99 * limit))
    hopeless = with_noise(preset, 1.01 * limit)
    with pytest.raises(Refused, match=r"Nothing was charged.*train_despite_noise"):
        check_prospects(hopeless)
    check_prospects(hopeless.updated({"purpose": "simulation"}))
    check_prospects(hopeless.updated({"release.train_despite_noise": "a baseline"}))


def test_regions_are_ordered_and_the_noise_names_the_users_needed():
    for region in REGIONS.values():
        assert 0 < region.helpful < region.hopeless / 2
    config = with_noise("quickstart", 0.01)
    found = prospects(config, plan_mechanism(config))
    assert found is not None
    assert found.region == "uncertain"
    assert users_needed(config, found) == pytest.approx(280_000, rel=1e-6)


def test_projection_tolerates_more_noise_than_a_whole_net():
    config = with_noise("quickstart", 0.1)
    projection = config.updated({"model.trainable": "projection"})
    found = prospects(projection, plan_mechanism(projection))
    assert found is not None
    assert found.region == "uncertain"
    check_prospects(projection)
    with pytest.raises(Refused):
        check_prospects(config)


def test_noise_of_a_classifier_counts_weights_and_rounds():
    """The length of the noise on the mean gradient of the whole training."""
    config = load_config("cifar10_transfer_head")
    plan = plan_mechanism(config)
    found = prospects(config, plan)
    assert found is not None
    weights = (config.model.embedding_dim + 1) * len(config.model.classes)
    per_round = plan.noise_multiplier / plan.normaliser * math.sqrt(weights)
    assert found.noise == pytest.approx(per_round / math.sqrt(plan.rounds))


@pytest.mark.parametrize("name", ["lenet", "resnet8_ws", "tanh_cnn", "tiny", "wrn_16_4"])
def test_table_of_weights_is_that_of_the_networks(name):
    settings = {"backbone": name, "image_size": 32, "channels": 3, "embedding_dim": 64}
    model = load_config("quickstart").model.model_copy(update=settings)
    built = build_backbone(model, seed=bytes(32))
    count = sum(math.prod(variable.shape) for variable in built.trainable_variables)
    assert WEIGHTS[name] == pytest.approx(count, rel=0.05)
