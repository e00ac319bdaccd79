"""Rounds with a vectorised map over units, and the exactness check before private data is read."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float32

from fedemb.engine.rounds import ClientExamples, RoundSums, Slab, SlabRounds
from fedemb.errors import Refused


class VectorizedRounds(SlabRounds):
    """Rounds whose units share a layout. It must not matter to any of them.

    Where the last numbers of a batch are computed in another way than the rest, a record depends on
    its place, and one unit more or less moves those of others.
    """

    probe_units = 64
    """Generated units, at least, that show whether the layout matters: one record in ten does."""
    layout = ""
    """The setting that says how many there are side by side."""
    _parallel_units: int
    _layout_checked = False

    @abstractmethod
    def _share(self, units: Sequence[ClientExamples], round_index: int, multiple: int) -> Any:
        """Units filled up to a multiple, a named tuple of arrays of as many rows; last `count`."""

    @abstractmethod
    def _generated_unit(self, group: int, random: np.random.Generator) -> ClientExamples:
        """Returns a generated unit that does not depend on data."""

    @abstractmethod
    def _sums_by_worker(
        self, weights: np.ndarray, units: Sequence[ClientExamples]
    ) -> list[np.ndarray]:
        """The integers that each worker makes of the same units."""

    def run(
        self, weights: Float32[np.ndarray, " dim"], slabs: Iterable[Slab], parameters: Any
    ) -> RoundSums:
        """See `SlabRounds`; calls `rehearse` before the first slab is read."""
        if not self._layout_checked:
            self.rehearse(weights)
        return super().run(weights, slabs, parameters)

    def rehearse(self, weights: Float32[np.ndarray, " dim"] | None = None) -> None:
        """Runs `require_exact` once, at the given weights or the initial weights."""
        self.require_exact(self.initial_weights() if weights is None else weights)
        self._layout_checked = True

    def require_exact(self, weights: Float32[np.ndarray, " dim"]) -> None:
        """Refuses to train where a record's bits depend on its place or its neighbours.

        Generated units: in order, reversed, and the first few also half of them at a time beside
        filled places. All ways must give the same integers on every worker. The weights are moved a
        little first: where a head starts at zero, all gradients below it would vanish.

        Raises:
          Refused: they do not.
        """
        size, random = self._parallel_units, np.random.default_rng(0)
        units = [
            self._generated_unit(group, random)
            for group in range(size * -(-self.probe_units // size))
        ]
        moved = weights + random.normal(0.0, 0.1, len(weights)).astype(np.float32)

        def sums(chosen: Sequence[ClientExamples]) -> list[np.ndarray]:
            return self._sums_by_worker(moved, chosen)

        def differ(expected: list[np.ndarray], found: list[np.ndarray]) -> bool:
            return any(not np.array_equal(one, expected[0]) for one in (*expected, *found))

        few = units[:size]
        halves = zip(sums(few[: size // 2]), sums(few[size // 2 :]), strict=True)
        if differ(sums(units), sums(units[::-1])) or differ(
            sums(few), [one + other for one, other in halves]
        ):
            raise Refused(
                f"Records depend on their position in a batch of {size} on this device, so one "
                f"unit could change the records of others. Set {self.layout} to another size (1 "
                "always works), or use a backbone whose channels are multiples of 16."
            )
