"""The loop over private rounds: the only one, for a pipeline step and for a simulation.

sample, load -> local training or gradient -> clip, exact sum -> noise -> commit -> server step
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from fedemb.config import ServerConfig
from fedemb.engine.feed import Feed
from fedemb.engine.rounds import RoundSums
from fedemb.engine.server import ServerState
from fedemb.engine.training_round import TrainingRound
from fedemb.privacy.queries import Mechanism


@dataclass(frozen=True)
class Round:
    """One finished round. Raw, but for `state` and `record`."""

    index: int
    """Number of the round, from 0."""
    l2_norm_clip: float
    """Clip of the round."""
    sums: RoundSums
    """Un-noised sums and per-client statistics."""
    record: Any
    """What `commit` returned."""
    state: ServerState
    """The server's state after the round. Noised."""
    seconds: dict[str, float]
    """How long `train`, `noise`, `commit` (with the server's step) and, in `train`, `wait` took."""


def run_rounds(
    function: TrainingRound,
    mechanism: Mechanism,
    server: ServerConfig,
    state: ServerState,
    feed: Feed,
    *,
    commit: Callable[[int, Any], Any] | None = None,
) -> Iterator[Round]:
    """Runs the rounds that `state` has not seen yet, one for each step of the iterator.

    Args:
      function: computes the clipped sum of a round.
      mechanism: mechanism of the attempt; noises the sum and accounts for it.
      server: rule that applies the noised mean.
      state: before the first round to run.
      feed: virtual clients of the same rounds.
      commit: commits a round, from its number and its `RoundOutput`; called before the output is
        used. None keeps no record.
    """
    for index in range(state.rounds, mechanism.plan.rounds):
        clip, start = mechanism.l2_norm_clip, time.perf_counter()
        sums = function.run(state.weights, feed.next_round(), mechanism.sample_params())
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
