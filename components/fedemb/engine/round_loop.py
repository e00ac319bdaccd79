"""The loop over private rounds, used by pipeline steps and simulations.

sample, load -> local training or gradient -> clip, exact sum -> noise -> commit -> server step
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from fedemb.config import ServerConfig
from fedemb.engine.feed import Feed
from fedemb.engine.rounds import RoundSums
from fedemb.engine.server import ServerState
from fedemb.engine.training_round import TrainingRound
from fedemb.privacy.queries import Mechanism, RoundOutput

_Unit = TypeVar("_Unit")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
"""Record of a committed round."""


@dataclass(frozen=True)
class Round(Generic[R_co]):
    """One finished round. Raw, except `state` and `record`."""

    index: int
    """Number of the round, from 0."""
    l2_norm_clip: float
    """Clip of the round."""
    sums: RoundSums
    """Un-noised sums and per-client statistics."""
    record: R_co | None
    """Result of `commit`."""
    state: ServerState
    """Server state after the round. Noised."""
    seconds: dict[str, float]
    """Seconds of `train`, `noise`, `commit` (with server step), and `wait` (part of `train`)."""


def run_rounds(
    function: TrainingRound[_Unit],
    mechanism: Mechanism,
    server: ServerConfig,
    state: ServerState,
    feed: Feed,
    *,
    commit: Callable[[int, RoundOutput], R] | None = None,
) -> Iterator[Round[R]]:
    """Runs the remaining rounds, one per iteration.

    Args:
      function: computes the clipped sum of a round.
      mechanism: mechanism of the attempt; noises the sum and accounts for it.
      server: configuration of the server step.
      state: server state before the first round to run.
      feed: virtual clients of the same rounds.
      commit: commits a round, from its number and its `RoundOutput`; called before the output is
        used. None keeps no record.
    """
    for index in range(state.rounds, mechanism.plan.rounds):
        clip, start = mechanism.plan.l2_norm_clip, time.perf_counter()
        sums = function.run(state.weights, feed.next_round(), mechanism.clip)
        trained = time.perf_counter()
        output = mechanism.aggregate(index, sums.sample_state)
        noised = time.perf_counter()
        record = commit(index, output) if commit else None
        state = function.advance(server, state, output.mean)
        seconds = {
            "train": trained - start,
            "noise": noised - trained,
            "commit": time.perf_counter() - noised,
            "wait": function.seconds_waited,
        }
        yield Round(index, clip, sums, record, state, seconds)
