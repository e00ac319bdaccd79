"""Warnings of a plan about its noise, and the temperature that corrects for it."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.special import logsumexp

from fedemb.pipelines.run.load_config import load_config
from fedemb.privacy.registry import plan_mechanism
from fedemb.training.noise_warnings import (
    LARGEST_THAT_GAINED,
    WARNED_FROM,
    temperature_for_noise,
    training_noise,
    warnings,
)
from fedemb.training.server import mean_shares


def with_noise(preset: str, noise: float, **settings: object):
    """A preset whose noise, in the unit of `LARGEST_THAT_GAINED`, is `noise`."""
    config = load_config(preset).updated(settings)
    found = training_noise(config, plan_mechanism(config))
    assert found is not None
    multiplier = config.mechanism.noise_multiplier * noise / found[1]
    return config.updated({"mechanism.noise_multiplier": multiplier})


@pytest.mark.parametrize(
    ("preset", "recipe"), [("quickstart", "whole_net"), ("cifar10_scatter", "head")]
)
def test_plan_warns_of_noise_far_above_that_of_every_measured_run(preset, recipe):
    limit = WARNED_FROM * LARGEST_THAT_GAINED[recipe][0]
    assert "noise_above_measured" not in warnings(with_noise(preset, 0.99 * limit))
    assert "noise_above_measured" in warnings(with_noise(preset, 1.01 * limit))


def test_projection_tolerates_more_noise_than_a_whole_net():
    config = with_noise("quickstart", 0.1)
    projection = config.updated({"model.trainable": "projection"})
    assert "noise_above_measured" in warnings(config)
    assert "noise_above_measured" not in warnings(projection)


def test_noise_of_a_classifier_counts_weights_and_rounds():
    """The length of the noise on the mean gradient of the whole training."""
    config = load_config("cifar10_scatter")
    plan = plan_mechanism(config)
    found = training_noise(config, plan)
    assert found is not None
    weights = (config.model.embedding_dim + 1) * len(config.model.classes)
    per_round = plan.noise_multiplier / plan.normalizer * math.sqrt(weights)
    assert found[1] == pytest.approx(per_round / math.sqrt(plan.rounds))


def head_at(epsilon_noise: float):
    """A head whose full batches have a large learning rate and much noise."""
    return load_config("cifar10_scatter").updated(
        {
            "mechanism.noise_multiplier": epsilon_noise,
            "mechanism.units_per_round": 1800,
            "partition.max_images_per_user": 1,
        }
    )


def test_temperature_corrects_probabilities_for_the_noise():
    config = head_at(28.9)
    plan = plan_mechanism(config)
    divisor = temperature_for_noise(config, plan)
    assert divisor is not None
    shares = mean_shares(config.training.server, plan.rounds)
    deviation = plan.noise_multiplier / plan.normalizer * math.hypot(*shares)
    random = np.random.default_rng(7)
    logits = random.normal(0.0, 0.9 * deviation, (20_000, 10))
    labels = (logits + random.gumbel(size=logits.shape)).argmax(axis=1)
    noised = logits + random.normal(0.0, deviation, logits.shape)

    def log_loss(temperature: float) -> float:
        scaled = noised / temperature
        own = scaled[np.arange(len(labels)), labels]
        return float((logsumexp(scaled, axis=1) - own).mean())

    assert log_loss(1.0) > 2 * math.log(10)
    best = min(log_loss(divisor * factor) for factor in (0.25, 0.5, 1.0, 1.4, 2.0, 4.0))
    assert log_loss(divisor) < min(math.log(10), 1.1 * best)


def test_plan_warns_of_probabilities_that_are_too_certain():
    config = head_at(28.9)
    divisor = temperature_for_noise(config, plan_mechanism(config))
    assert divisor is not None
    assert "probabilities_too_certain" in warnings(config)
    set_right = config.updated({"model.temperature": round(divisor, 1)})
    assert "probabilities_too_certain" not in warnings(set_right)


def test_no_temperature_follows_from_the_noise_in_all_layers():
    config = load_config("cifar10_resnet8")
    assert temperature_for_noise(config, plan_mechanism(config)) is None
