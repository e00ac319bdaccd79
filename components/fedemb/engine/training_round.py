"""What the loop needs of a kind of round, however it is computed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import numpy as np

from fedemb.engine.rounds import RoundSums
from fedemb.engine.server import ServerRule


class TrainingRound(Protocol):
    """Units in, their clipped integer sum out."""

    mechanism: Any
    """`privacy.queries.Mechanism`: samples, clips, sums, noises and prices."""
    dim: int
    """Numbers that train."""
    seconds_waited: float
    """Of the last round: how long it waited for data."""

    @property
    def advance(self) -> ServerRule:
        """The server's step on the noised mean."""
        ...

    def initial_weights(self) -> np.ndarray:
        """What trains, before the first round, float32 `[dim]`."""
        ...

    def slabs(self, units: Iterable[Any], round_index: int) -> Iterator[Any]:
        """Packs the units of a round, some at a time; see `Feed`."""
        ...

    def run(self, weights: np.ndarray, slabs: Iterable[Any]) -> RoundSums:
        """The clipped sum of a round over its packed units, from the weights all start from."""
        ...
