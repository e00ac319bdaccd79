"""A simulation is the pipeline's own training on arrays, and says what it is."""

import math

import numpy as np
import pytest
from pydantic import ValidationError

from fedemb import Simulation
from fedemb.config import LocalTrainingConfig, ModelConfig, TrainingConfig
from fedemb.data.builtin import ArrayUsers
from fedemb.errors import ConfigError, InputError
from fedemb.foundation.canonical_json import json_digest
from fedemb.keys import derive
from fedemb.models.backbones import build_backbone
from fedemb.privacy.running import build_mechanism
from fedemb.training.rounds import ClientExamples
from fedemb.training.server import initial_state, released_weights, server_step
from fedemb.training.simulation import RUN_ID
from fedemb.training.tensorflow_clients import RoundFunction

KEY = bytes(range(32))
PEOPLE = np.repeat(np.arange(24), 3)
IMAGES = np.random.default_rng(0).integers(0, 256, (72, 12, 12, 1), np.uint8)
MODEL = ModelConfig(backbone="tiny", image_size=12, embedding_dim=8)
MECHANISM = {
    "kind": "group_poisson_gaussian",
    "rounds": 3,
    "sampling_probability": 0.5,
    "noise_multiplier": 2.0,
}
TRAINING = TrainingConfig(local=LocalTrainingConfig(batch_size=4), parallel_clients=1)


def simulation(**changes):
    parts = {"mechanism": MECHANISM, "virtual_clients": 4, "model": MODEL, "training": TRAINING}
    return Simulation(**parts | changes)


def flat(model):
    return np.concatenate([v.numpy().ravel() for v in model.trainable_variables])


@pytest.fixture(scope="module")
def history():
    return []


@pytest.fixture(scope="module")
def result(history):
    return simulation().train(IMAGES, PEOPLE, PEOPLE, root_key=KEY, on_round=history.append)


def test_simulation_equals_its_building_blocks_bit_for_bit(result, history):
    """Sampler, local training, clip, noise and server step put together by hand."""
    mechanism = build_mechanism(result.plan, KEY, RUN_ID, 1, json_digest({}))
    people = ArrayUsers(
        IMAGES, PEOPLE, PEOPLE, virtual_clients=4, groupings=1, key=derive(KEY, "partition")
    )
    backbone = build_backbone(MODEL, 0)
    function = RoundFunction(backbone, mechanism, TRAINING.local)
    state = initial_state(function.initial_weights())
    for number in range(3):
        clients = [
            ClientExamples(one.grouping, one.group, *people.examples(one.users, 1000))
            for one in mechanism.sample_clients(number, people)
        ]
        sums = function(state.weights, clients, number)
        output = mechanism.aggregate(number, sums.total)
        state = server_step(TRAINING.server, state, output.mean, rounds=3)
        assert np.array_equal(history[number].state.weights, state.weights)
    assert np.array_equal(flat(result.model), released_weights(TRAINING.server, state))


def test_the_guarantee_is_the_plans_price_and_says_simulation(result):
    text = str(result.guarantee)
    assert text.startswith("simulation, not to be released: (")
    assert "the key was passed in" in text
    assert result.guarantee.delta == pytest.approx(24**-1.1)
    again = simulation(delta=1e-3, population=500).train(IMAGES, PEOPLE, PEOPLE)
    assert "handed in" not in str(again.guarantee)
    assert again.guarantee.delta == 1e-3
    assert 0 < result.guarantee.epsilon < again.guarantee.epsilon < math.inf
    assert not np.array_equal(flat(again.model), flat(result.model)), "fresh coins and noise"


def test_shared_head_is_reported_as_not_covered():
    training = TRAINING.model_copy(update={"algorithm": "dp_fedavg"})
    found = simulation(training=training).train(IMAGES, PEOPLE, PEOPLE)
    assert "list of all classes" in str(found.guarantee)
    assert found.embed(IMAGES).shape == (72, 8)


def test_simulation_starts_from_the_given_public_backbone(result):
    start = build_backbone(MODEL, 7)
    still = TRAINING.model_copy(
        update={"server": TRAINING.server.model_copy(update={"learning_rate": 1e-30})}
    )
    plain = {**MECHANISM, "noise_multiplier": 0.0}
    moved = simulation(training=still, mechanism=plain)
    found = moved.train(IMAGES, PEOPLE % 5, PEOPLE, start=start)
    assert flat(found.model) == pytest.approx(flat(start), abs=1e-6)
    assert "no differential privacy" in str(found.guarantee)
    assert found.guarantee.epsilon == math.inf


def test_recall_of_identical_images_is_one(result):
    copies = np.concatenate([IMAGES[::3], IMAGES[::3]])
    estimate = result.recall(copies, np.tile(np.arange(24), 2), false_accept_rate=0.5)
    assert estimate.value == 1.0, "an image has the embedding of its copy"
    assert np.linalg.norm(result.embed(IMAGES), axis=1) == pytest.approx(1.0, abs=1e-5)


def test_simulation_refuses_invalid_images_backbones_and_settings(result):
    with pytest.raises(InputError, match=r"wanted uint8 \[n, 12, 12, 1\]"):
        simulation().train(IMAGES[:, :10, :10], PEOPLE, PEOPLE)
    with pytest.raises(InputError, match=r"float32 .* convert them"):
        result.embed(IMAGES.astype(np.float32))
    other = build_backbone(MODEL.model_copy(update={"embedding_dim": 9}), 7)
    with pytest.raises(ConfigError, match=r"is not the network of model\.backbone"):
        simulation().train(IMAGES, PEOPLE, PEOPLE, start=other)
    with pytest.raises(ConfigError, match="train_centralized"):
        simulation(training=TRAINING.model_copy(update={"algorithm": "dp_covariance"})).train(
            IMAGES, PEOPLE, PEOPLE
        )
    with pytest.raises(ValidationError, match="mechanism"):
        Simulation(virtual_clients=4)
