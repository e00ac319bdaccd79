"""Noise of a run: bound by key to everything that goes in and to the sums it hides.

One object per attempt. `begin` fixes the round's tag from every integer that will be noised in it,
`add` then draws the noise of one of them. A replayed round gives identical output, so there is
nothing to average; other data gives independent noise, so there is nothing to subtract (dp.md 5).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
from typing_extensions import override

from fedemb.errors import PlanMismatch
from fedemb.privacy.mechanisms import blt
from fedemb.privacy.mechanisms.mechanism import MechanismPlan
from fedemb.privacy.mechanisms.noise import (
    MAX_NORMALS,
    Integers,
    add_rounded_noise,
    gaussian,
    round_tag,
    tensor_key,
)


class CorrelatedStream(Protocol):
    """Noise whose rows depend on earlier rows."""

    def next(self, key: bytes) -> Integers:
        """Returns the noise of the next round, `[size]`; fresh normals come from `key`."""
        ...


StreamFactory = Callable[[MechanismPlan, int], CorrelatedStream]
"""Makes the stream of a plan for vectors of the given size."""


class KeyedNoise:
    """Noise source of one attempt; its state is a list of tags, which say nothing without the key.

    Args:
      plan: the mechanism.
      noise_key: `noise.run_key(root, "noise", ...)`.
      stream: makes the correlated noise of `tree_aggregation` and `blt`.
    """

    def __init__(self, plan: MechanismPlan, noise_key: bytes, stream: StreamFactory | None = None):
        self._plan = plan
        self._key = noise_key
        self._make_stream = stream
        self._stream: CorrelatedStream | None = None
        self._tag = b""
        self.tags: list[bytes] = []
        """Tags of the rounds so far, in order; kept only where later noise depends on them."""

    def begin(self, round_index: int, quantities: dict[str, Integers]) -> None:
        """Fixes the tag of a round.

        Args:
          round_index: the round.
          quantities: every integer quantity that will be noised in this round.

        Raises:
          PlanMismatch: so many values that the noise sampler's share of delta would be passed.
        """
        size = sum(values.size for values in quantities.values())
        # A tree draws at most two nodes a round.
        if 2 * size * self._plan.rounds > MAX_NORMALS:
            raise PlanMismatch(
                f"{self._plan.rounds} rounds of {size} values exceed the {MAX_NORMALS} normals the "
                "noise sampler is accounted for; lower rounds"
            )
        self._tag = round_tag(self._key, round_index, quantities)

    def add(self, name: str, values: Integers, scale: float) -> Integers:
        """Returns values plus rounded normals of standard deviation `scale` grid units."""
        return add_rounded_noise(values, tensor_key(self._key, self._tag, name), scale)

    def add_correlated(self, name: str, values: Integers) -> Integers:
        """Returns values plus the next row of the correlated noise; earlier rows are redrawn."""
        if self._stream is None:
            assert self._make_stream is not None
            self._stream = self._make_stream(self._plan, values.size)
            for tag in self.tags:
                self._stream.next(tensor_key(self._key, tag, name))
        self.tags.append(self._tag)
        return values + self._stream.next(tensor_key(self._key, self._tag, name))

    def restore(self, tags: list[bytes]) -> None:
        """Continues after the rounds of these tags; their noise is redrawn when it is needed."""
        self.tags, self._stream = list(tags), None


class BltStream(CorrelatedStream):
    """Rows of C^-1 Z, scaled to the grid and rounded."""

    def __init__(self, plan: MechanismPlan, size: int):
        assert plan.blt_decay is not None
        assert plan.blt_scale is not None
        self._size = size
        self._scale = grid_scale(plan)
        self._noise = blt.NoiseStream(plan.blt_decay, plan.blt_scale, size)

    @override
    def next(self, key: bytes) -> Integers:
        row = self._noise.next(gaussian(key, self._size)) * self._scale
        return np.rint(row).astype(np.int64)


def grid_scale(plan: MechanismPlan) -> float:
    """Standard deviation of the noise on the sum, in units of the grid."""
    return plan.noise_multiplier * 2.0**plan.grid_bits
