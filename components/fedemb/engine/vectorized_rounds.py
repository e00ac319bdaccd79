"""Rounds with a vectorized map over units, and an exactness check before private data is read."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Generic, Protocol, Self, TypeVar, overload

import numpy as np
from jaxtyping import Float32

from fedemb.engine.rounds import ClientExamples, RoundSums, Slab, SlabRounds
from fedemb.errors import Refused
from fedemb.privacy.queries import Parameters

Part_co = TypeVar("Part_co", covariant=True)


class Padded(Protocol[Part_co]):
    """Named tuple of arrays with a row for each unit, padded to a fixed number of rows."""

    @property
    def real(self) -> Part_co:
        """Last array: number of units, int32; the other rows are padding."""
        ...

    @classmethod
    def _make(cls, iterable: Iterable[object]) -> Self: ...

    def __iter__(self) -> Iterator[Part_co]: ...
    @overload
    def __getitem__(self, key: int, /) -> Part_co: ...
    @overload
    def __getitem__(self, key: slice, /) -> tuple[Part_co, ...]: ...


Units = TypeVar("Units", bound=Padded[np.ndarray])
"""Padded units on the host."""


class VectorizedRounds(SlabRounds, Generic[Units]):
    """Rounds that compute several units in one batch.

    A record must not depend on its position in the batch. If the last elements of a batch are
    computed differently, adding or removing one unit would change the records of others.
    """

    probe_units = 64
    """Minimum number of generated units of the check; about one record in ten is affected."""
    layout = ""
    """Setting of the batch size."""
    _parallel_units: int
    _layout_checked = False

    @abstractmethod
    def _share(self, units: Sequence[ClientExamples], round_index: int, multiple: int) -> Units:
        """Returns units padded to a multiple: see `Padded`."""

    @abstractmethod
    def _generated_unit(self, group: int, random: np.random.Generator) -> ClientExamples:
        """Returns a generated unit that does not depend on data."""

    @abstractmethod
    def _sums_by_worker(
        self, weights: np.ndarray, units: Sequence[ClientExamples]
    ) -> list[np.ndarray]:
        """Returns the integer sums of each worker for the same units."""

    def run(
        self, weights: Float32[np.ndarray, " dim"], slabs: Iterable[Slab], parameters: Parameters
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
        """Checks that the bits of a record do not depend on its position or its batch.

        Computes generated units in order, reversed, and in half batches with padding. All must give
        the same integers on every worker. The weights are perturbed first, because a head of zeros
        has no gradients below it.

        Raises:
          Refused: the integers differ.
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
