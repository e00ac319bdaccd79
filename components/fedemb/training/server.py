"""The server step, and the working state of an attempt as one file."""

# The numeric libraries are not fully typed; the project's own signatures are checked.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false

from __future__ import annotations

import io
import json
import math
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float32

from fedemb.config import ServerConfig
from fedemb.foundation.canonical_json import JsonObject


def learning_rate(config: ServerConfig, round_index: int, rounds: int) -> float:
    """Returns the rate of a round, by the decay schedule over all rounds."""
    progress = round_index / max(1, rounds)
    factor = {
        "constant": 1.0,
        "cosine": 0.5 * (1.0 + math.cos(math.pi * progress)),
        "linear": 1.0 - progress,
    }[config.schedule]
    return config.learning_rate * factor


STATE_ARRAYS = ("weights", "momentum", "average")


@dataclass(frozen=True)
class ServerState:
    """Weights, optimizer slots and averaged weights, float32; all noised."""

    weights: np.ndarray
    """`[dim]`."""
    momentum: np.ndarray
    """`[dim]`."""
    average: np.ndarray
    """Weighted sum of the weights so far, `[dim]`; see `released_weights`."""
    rounds: int
    """Rounds applied."""

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """All arrays by name, see `STATE_ARRAYS`."""
        return {name: getattr(self, name) for name in STATE_ARRAYS}


def initial_state(weights: Float32[np.ndarray, " dim"]) -> ServerState:
    """Returns the state before round 0."""
    zeros = np.zeros_like(weights)
    return ServerState(weights.copy(), zeros, zeros.copy(), 0)


def server_step(
    config: ServerConfig,
    state: ServerState,
    mean: Float32[np.ndarray, " dim"],
    *,
    rounds: int,
    l2_norm_clip: float = 1.0,
) -> ServerState:
    """Applies one noised mean update.

    >>> config = ServerConfig(learning_rate=0.5, momentum=0.0)
    >>> before = initial_state(np.zeros(2, np.float32))
    >>> server_step(config, before, np.array([1, -2], np.float32), rounds=10).weights
    array([ 0.5, -1. ], dtype=float32)

    Args:
      config: schedule, averaging.
      state: before the round.
      mean: float32 `[dim]`, mean of trained minus broadcast weights, or of downhill gradients;
        weights move along it.
      rounds: planned rounds, for the schedule.
      l2_norm_clip: clip of the plan, for `rescale_to_unit_norm`.
    """
    rate = np.float32(learning_rate(config, state.rounds, rounds))
    if config.rescale_to_unit_norm:
        mean = mean / np.float32(l2_norm_clip)
    momentum = np.float32(config.momentum) * state.momentum + mean
    weights = state.weights + rate * momentum
    share, one = np.float32(config.ema_decay), np.float32(1.0)
    return ServerState(
        weights=weights,
        momentum=momentum,
        average=share * state.average + (one - share) * weights,
        rounds=state.rounds + 1,
    )


def solved_state(
    config: ServerConfig, weights: Float32[np.ndarray, " dim"], rounds: int = 1
) -> ServerState:
    """Returns the state after a round that gave the released weights instead of a step."""
    share = np.float32(1.0 - config.ema_decay**rounds)
    return ServerState(weights, np.zeros_like(weights), share * weights, rounds)


def released_weights(config: ServerConfig, state: ServerState) -> Float32[np.ndarray, " dim"]:
    """Returns the exponential average of the weights after each round, without initial bias.

    Args:
      config: server configuration of the run.
      state: state after the last round.
    """
    decay = config.ema_decay
    if decay == 0.0 or state.rounds == 0:
        return state.weights
    return state.average / np.float32(1.0 - decay**state.rounds)


# Working state of an attempt as one file: what JSON can say, and arrays beside it.


_HEAD = "head"


def pack(head: Mapping[str, object], arrays: Mapping[str, np.ndarray]) -> bytes:
    """Packs a JSON object and arrays; no array is called `head`."""
    packed = io.BytesIO()
    text = np.frombuffer(json.dumps(head).encode(), np.uint8)
    np.savez(packed, allow_pickle=False, **{_HEAD: text}, **arrays)
    return packed.getvalue()


def unpack(data: bytes, *names: str) -> tuple[JsonObject, dict[str, np.ndarray]]:
    """The object of `pack`, and the arrays of these names.

    Raises:
      ValueError: it was cut or changed, or lacks an array.
    """
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as packed:
            return json.loads(packed[_HEAD].tobytes()), {name: packed[name] for name in names}
    except (KeyError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError("the bytes are not a packed state") from error
