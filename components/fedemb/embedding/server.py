"""The server's step on the noised mean update: post-processing, free of charge.

Plain numpy on one flat vector, in a fixed order: a resumed run computes the same bits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from fedemb.config import ServerConfig

ADAM_BETA_2, ADAM_EPSILON = 0.99, 1e-3


def learning_rate(config: ServerConfig, round_index: int, rounds: int) -> float:
    """Rate of a round: linear warm-up, then constant, cosine or linear decay over all rounds."""
    if round_index < config.warmup_rounds:
        return config.learning_rate * (round_index + 1) / config.warmup_rounds
    left = max(1, rounds - config.warmup_rounds)
    progress = (round_index - config.warmup_rounds) / left
    factor = {
        "constant": 1.0,
        "cosine": 0.5 * (1.0 + math.cos(math.pi * progress)),
        "linear": 1.0 - progress,
    }[config.schedule]
    return config.learning_rate * factor


@dataclass(frozen=True)
class ServerState:
    """Weights, optimizer slots and averaged weights, float32 `[dim]` each; all noised."""

    weights: np.ndarray
    momentum: np.ndarray
    second_moment: np.ndarray
    """Adam only; else empty."""
    average: np.ndarray
    """Weighted sum of the weights so far; see `released_weights`."""
    average_weight: float
    """Sum of the factors in `average`: 1 - decay^rounds."""
    rounds: int
    """Rounds applied."""


def initial_state(config: ServerConfig, weights: np.ndarray) -> ServerState:
    """State before round 0."""
    zeros = np.zeros_like(weights)
    second = zeros.copy() if config.optimizer == "adam" else zeros[:0].copy()
    return ServerState(weights.copy(), zeros, second, zeros.copy(), 0.0, 0)


def server_step(
    config: ServerConfig, state: ServerState, mean: np.ndarray, *, rounds: int
) -> ServerState:
    """Applies one noised mean update.

    Args:
      config: optimizer, schedule, averaging.
      state: before the round.
      mean: float32 `[dim]`, mean of trained minus broadcast weights; weights move along it.
      rounds: planned rounds, for the schedule.
    """
    rate = np.float32(learning_rate(config, state.rounds, rounds))
    beta, one = np.float32(config.momentum), np.float32(1.0)
    time = state.rounds + 1
    if config.optimizer == "adam":
        beta_2 = np.float32(ADAM_BETA_2)
        momentum = beta * state.momentum + (one - beta) * mean
        second = beta_2 * state.second_moment + (one - beta_2) * np.square(mean)
        bias = math.sqrt(1.0 - ADAM_BETA_2**time) / (1.0 - config.momentum**time)
        step = np.float32(bias) * momentum / (np.sqrt(second) + np.float32(ADAM_EPSILON))
    else:
        momentum, second = beta * state.momentum + mean, state.second_moment
        step = momentum
    weights = state.weights + rate * step
    decay = config.ema_decay
    average = np.float32(decay) * state.average + np.float32(1.0 - decay) * weights
    return ServerState(
        weights=weights,
        momentum=momentum,
        second_moment=second,
        average=average,
        average_weight=decay * state.average_weight + (1.0 - decay),
        rounds=time,
    )


def released_weights(config: ServerConfig, state: ServerState) -> np.ndarray:
    """Exponential average of the weights after each round, without bias to the start."""
    if config.ema_decay == 0.0 or state.rounds == 0:
        return state.weights
    return state.average / np.float32(state.average_weight)
