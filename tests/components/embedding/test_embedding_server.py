import math

import numpy as np
import pytest

from fedemb.config import ServerConfig
from fedemb.engine.server import (
    initial_state,
    learning_rate,
    mean_shares,
    released_weights,
    server_step,
)

MEANS = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)


def _run(config, means=MEANS):
    state = initial_state(config, np.ones(3, np.float32))
    history = []
    for mean in means:
        state = server_step(config, state, mean, rounds=len(means))
        history.append(state.weights)
    return state, history


def test_sgd_with_momentum_moves_along_the_mean():
    state, _ = _run(ServerConfig(learning_rate=0.5, momentum=0.9, ema_decay=0))
    weights, slot = np.ones(3), np.zeros(3)
    for mean in MEANS:
        slot = 0.9 * slot + mean
        weights = weights + 0.5 * slot
    np.testing.assert_allclose(state.weights, weights, rtol=1e-6)
    assert state.weights.dtype == np.float32
    assert state.rounds == 5


def test_adam_follows_its_formula():
    state, _ = _run(ServerConfig(optimizer="adam", learning_rate=0.1, momentum=0.8))
    weights, first, second = np.ones(3), np.zeros(3), np.zeros(3)
    for time, mean in enumerate(MEANS.astype(float), start=1):
        first = 0.8 * first + 0.2 * mean
        second = 0.99 * second + 0.01 * mean**2
        rate = 0.1 * math.sqrt(1 - 0.99**time) / (1 - 0.8**time)
        weights = weights + rate * first / (np.sqrt(second) + 1e-3)
    np.testing.assert_allclose(state.weights, weights, rtol=1e-5)


def test_released_weights_are_the_unbiased_average():
    config = ServerConfig(ema_decay=0.7)
    state, history = _run(config)
    factors = 0.3 * 0.7 ** np.arange(4, -1, -1)
    expected = np.tensordot(factors / factors.sum(), np.array(history), 1)
    np.testing.assert_allclose(released_weights(config, state), expected, rtol=1e-5)
    start = initial_state(config, np.ones(3, np.float32))
    np.testing.assert_array_equal(released_weights(config, start), 1)
    plain = ServerConfig(ema_decay=0)
    assert released_weights(plain, state) is state.weights


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.5, 1, 1, 1, 1, 1]),
        ("linear", [0.5, 1, 1, 0.75, 0.5, 0.25]),
        ("cosine", [0.5, 1, 1, 0.853553, 0.5, 0.146447]),
    ],
)
def test_schedules_warm_up_then_decay(schedule, expected):
    config = ServerConfig(learning_rate=1, schedule=schedule, warmup_rounds=2)
    rates = [learning_rate(config, index, 6) for index in range(6)]
    np.testing.assert_allclose(rates, expected, rtol=1e-5)


def test_the_step_does_not_depend_on_the_clip_once_rescaled():
    config = ServerConfig(rescale_to_unit_norm=True)
    start = initial_state(config, np.ones(3, np.float32))
    small, large = (
        server_step(config, start, clip * MEANS[0], rounds=5, l2_norm_clip=clip).weights
        for clip in (0.1, 4.0)
    )
    np.testing.assert_allclose(small, large, rtol=1e-6)


def test_nesterov_looks_one_step_ahead_and_decay_takes_its_share():
    config = ServerConfig(learning_rate=0.5, nesterov=True, weight_decay=0.1, ema_decay=0)
    state, _ = _run(config)
    weights, slot = np.ones(3), np.zeros(3)
    for mean in MEANS:
        slot = 0.9 * slot + mean
        weights = weights + 0.5 * (0.9 * slot + mean - 0.1 * weights)
    np.testing.assert_allclose(state.weights, weights, rtol=1e-5)


def test_lamb_moves_each_tensor_by_its_own_length():
    config = ServerConfig(optimizer="lamb", learning_rate=0.1, ema_decay=0)
    start = initial_state(config, np.array([3.0, 4.0, 0.0], np.float32))
    moved = server_step(config, start, MEANS[0], rounds=5, sizes=[2, 1]).weights - start.weights
    assert np.linalg.norm(moved[:2]) == pytest.approx(0.1 * 5.0, rel=1e-5)
    adam = server_step(
        config.model_copy(update={"optimizer": "adam"}), start, MEANS[0], rounds=5
    ).weights
    assert moved[2] == pytest.approx(adam[2])  # a tensor of zeros moves by the step as it is


def test_factors_of_the_means_give_the_released_weights():
    config = ServerConfig(
        learning_rate=0.3, momentum=0.7, nesterov=True, weight_decay=0.05, schedule="cosine",
        warmup_rounds=2, ema_decay=0.6,
    )  # fmt: skip
    state = initial_state(config, np.zeros(MEANS.shape[1], np.float32))
    for mean in MEANS:
        state = server_step(config, state, mean, rounds=len(MEANS))
    expected = mean_shares(config, len(MEANS)) @ MEANS
    np.testing.assert_allclose(released_weights(config, state), expected, rtol=1e-5)
