"""Interface that every kind of training round implements."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol, TypeVar

import numpy as np

from fedemb.engine.rounds import RoundSums, Slab
from fedemb.engine.server import ServerRule
from fedemb.privacy.queries import Mechanism, Parameters

Unit_contra = TypeVar("Unit_contra", contravariant=True)
"""Examples or features of one virtual client or unit."""


class TrainingRound(Protocol[Unit_contra]):
    """Training round: takes units and returns their clipped integer sum."""

    mechanism: Mechanism
    """Clips and sums; may have no keys. The mechanism of the attempt is passed separately."""
    dim: int
    """Number of trained values."""
    seconds_waited: float
    """Seconds that the last round waited for data."""

    @property
    def advance(self) -> ServerRule:
        """Returns the server step on the noised mean."""
        ...

    def initial_weights(self) -> np.ndarray:
        """Returns the initial trained values, float32 `[dim]`."""
        ...

    def slabs(self, units: Iterable[Unit_contra], round_index: int) -> Iterator[Slab]:
        """Packs the units of a round, some at a time; see `Feed`."""
        ...

    def run(self, weights: np.ndarray, slabs: Iterable[Slab], parameters: Parameters) -> RoundSums:
        """Returns the clipped sum of a round over its packed units.

        Args:
          weights: float32 `[dim]`, initial weights of all units.
          slabs: packed units of the round.
          parameters: `Mechanism.clip` of the mechanism that noises the sum.
        """
        ...
