import math

import numpy as np
import pytest

from fedemb.config import ServerConfig
from fedemb.embedding.server import initial_state, learning_rate, released_weights, server_step

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
