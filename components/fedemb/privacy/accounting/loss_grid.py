"""Selects the grid of an event's privacy losses, and computes a quick upper bound for searches.

Losses are rounded so that epsilon can only be too large on any grid (`gaussian_losses`,
`composed_losses`). A coarse grid is valid but pessimistic. Its error follows from the spacing:
rounding adds at most spacing^2 / 4 to the variance of one round's loss.
"""

# The numeric libraries ship no types; the project's own signatures are checked.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator, Sequence

from dp_accounting import dp_event as dpe
from dp_accounting.privacy_accountant import NeighboringRelation

from fedemb.privacy.accounting.composed_losses import ComposedLosses
from fedemb.privacy.accounting.events import (
    event_from_json,
    event_to_json,
)
from fedemb.privacy.accounting.gaussian_losses import GridLosses, Mixture, gaussian_losses

Directions = tuple[GridLosses, ...]
"""Losses with the unit against without, and the reverse unless both are equal."""

DISCRETISATION = 1e-4
"""Grid spacing of the privacy losses of every guarantee."""
QUICK_TOLERANCE = 1e-3
"""Maximum relative excess of `quick_epsilon` over the value on the fine grid."""
_FINE_REACH = 100.0
"""Maximum privacy loss of one round on the fine grid: noise multipliers above 0.24."""
_COARSE_POINTS = 2e6
"""Maximum points of the grid of a whole run beyond that loss."""
_MIXTURE_POINTS = 200_000
"""Maximum points of the grid of one mixture of Gaussians; each point is searched separately, which
takes 15 microseconds."""
_FIRST_GRID = 0.02
"""Initial grid spacing of `quick_epsilon`."""


def discretisation(event: dpe.DpEvent) -> float:
    """Returns the grid of privacy losses of an event: fine, unless little noise makes it too large.

    At noise multiplier 0.01, one round's losses reach 20,000. A grid of 1e-4 would take hours and
    all memory, for an epsilon that is useless. Estimates are pessimistic on any grid.
    """
    reaches = list(_reaches(event, 1))
    finest = max([DISCRETISATION, *(span / _MIXTURE_POINTS for span in _spans(event))])
    if all(reach <= _FINE_REACH for reach, _ in reaches):
        return finest
    return max(finest, sum(reach * times for reach, times in reaches) / _COARSE_POINTS)


def pld_of(event: dpe.DpEvent, relation: NeighboringRelation) -> PrivacyLosses:
    """Returns the losses of an event on its `discretisation`; the result is cached."""
    return _kept(_key(event), relation)


def quick_epsilon(event: dpe.DpEvent, relation: NeighboringRelation, delta: float) -> float:
    """Returns an upper bound on epsilon, at most `QUICK_TOLERANCE` too large, in 1/10 of the time.

    For curves and searches; never reported as a guarantee. The grid is refined until it suits the
    epsilon found: over T rounds, a spacing of g costs about 2 T g^2 / epsilon (measured, for
    epsilon from 0.02 to 20). It is never finer than `discretisation`, where both values are equal.
    """
    return _quick(_key(event), relation, delta)


@functools.lru_cache(maxsize=1024)
def _quick(key: str, relation: NeighboringRelation, delta: float) -> float:
    event = event_from_json(json.loads(key))
    rounds = max(1, sum(times for _, times in _reaches(event, 1)))
    finest = discretisation(event)
    grid = max(finest, _FIRST_GRID)
    while True:
        if grid == finest:
            return _kept(key, relation).get_epsilon(delta)
        epsilon = PrivacyLosses(event, relation, grid).get_epsilon(delta)
        wanted = max(finest, epsilon * math.sqrt(QUICK_TOLERANCE / 8 / rounds))
        if not wanted < 0.8 * grid:
            return epsilon
        grid = wanted


@functools.lru_cache(maxsize=64)
def _kept(key: str, relation: NeighboringRelation) -> PrivacyLosses:
    event = event_from_json(json.loads(key))
    return PrivacyLosses(event, relation, discretisation(event))


class PrivacyLosses:
    """The privacy losses of an event on one grid, in both directions.

    Args:
      event: composed event; the dispatch table must list it under PLD.
      relation: neighbouring relation of the event.
      grid: spacing of the losses.
    """

    def __init__(self, event: dpe.DpEvent, relation: NeighboringRelation, grid: float):
        self._relation, self._grid = relation, grid
        self._parts: list[tuple[Directions, int]] = []
        self._gaussians = 0.0
        self._private = True
        try:
            self._walk(event, 1)
            if self._gaussians:
                self._parts.append((self._mixture([1.0], [1.0], self._gaussians**-0.5), 1))
        except OverflowError:  # losses beyond float64: no meaningful privacy
            self._private = False
        ways = (0, 1) if any(len(directions) > 1 for directions, _ in self._parts) else (0,)
        self.directions = [
            ComposedLosses(
                [(directions[-1 if way else 0], count) for directions, count in self._parts]
            )
            for way in ways
        ]
        """Losses drawn with the unit and, unless both are equal, drawn without it."""

    def get_epsilon(self, delta: float) -> float:
        """Returns an upper bound on epsilon of ideal noise at a delta."""
        if not self._private:
            return math.inf
        return max(losses.epsilon(delta) for losses in self.directions)

    def get_delta(self, epsilon: float) -> float:
        """Returns an upper bound on delta of ideal noise at an epsilon."""
        if not self._private:
            return 1.0
        return max(losses.delta(epsilon) for losses in self.directions)

    def _walk(self, event: dpe.DpEvent, times: int) -> None:
        match event:
            case dpe.NoOpDpEvent():
                return
            case dpe.SelfComposedDpEvent():
                self._walk(event.event, times * event.count)
            case dpe.ComposedDpEvent():
                for inner in event.events:
                    self._walk(inner, times)
            case dpe.GaussianDpEvent() if event.noise_multiplier > 0:
                # Gaussians compose exactly to one Gaussian.
                self._gaussians += times / event.noise_multiplier**2
            case dpe.PoissonSampledDpEvent(event=dpe.GaussianDpEvent(noise_multiplier=sigma)) if (
                sigma > 0
            ):
                q = event.sampling_probability
                self._parts.append((self._mixture([1 - q, q], [0.0, 1.0], sigma), times))
            case dpe.MixtureOfGaussiansDpEvent() if event.standard_deviation > 0:
                chances, moved = event.sampling_probs, event.sensitivities
                sigma = event.standard_deviation
                self._parts.append((self._mixture(chances, moved, sigma), times))
            case _:
                self._private = False

    def _mixture(
        self, chances: Sequence[float], moved: Sequence[float], sigma: float
    ) -> Directions:
        """Returns losses of a sum that moves by one of several lengths, in clipping norms."""
        pairs = [(chance, move / sigma) for chance, move in zip(chances, moved, strict=True)]
        up = tuple(sorted(pair for pair in pairs if pair[0] > 0))
        down = tuple((chance, -shift) for chance, shift in up)
        if self._relation is NeighboringRelation.REPLACE_ONE:
            return (_losses(up, down, self._grid),)
        still = ((1.0, 0.0),)
        if len(up) == 1:  # by symmetry both directions are equal
            return (_losses(up, still, self._grid),)
        return _losses(up, still, self._grid), _losses(still, down, self._grid)


@functools.lru_cache(maxsize=32)
def _losses(upper: Mixture, lower: Mixture, grid: float) -> GridLosses:
    return gaussian_losses(upper, lower, grid)


def _key(event: dpe.DpEvent) -> str:
    return json.dumps(event_to_json(event))


def _reaches(event: dpe.DpEvent, times: int) -> Iterator[tuple[float, int]]:
    """Yields the largest relevant privacy loss of each nested Gaussian, and its repetitions."""
    match event:
        case dpe.GaussianDpEvent():
            if event.noise_multiplier > 0:
                yield 2 / event.noise_multiplier**2 + 16 / event.noise_multiplier, times
        case dpe.MixtureOfGaussiansDpEvent():
            yield 0.0, times  # all images at once reach far, with negligible probability
        case dpe.SelfComposedDpEvent():
            yield from _reaches(event.event, times * event.count)
        case dpe.PoissonSampledDpEvent():
            yield from _reaches(event.event, times)
        case dpe.ComposedDpEvent():
            for inner in event.events:
                yield from _reaches(inner, times)
        case _:
            return


def _spans(event: dpe.DpEvent) -> Iterator[float]:
    """Yields the largest privacy loss of each nested mixture of Gaussians, however unlikely."""
    match event:
        case dpe.MixtureOfGaussiansDpEvent():
            moved = max(event.sensitivities) / event.standard_deviation
            yield moved**2 / 2 + 8 * moved
        case dpe.SelfComposedDpEvent() | dpe.PoissonSampledDpEvent():
            yield from _spans(event.event)
        case dpe.ComposedDpEvent():
            for inner in event.events:
                yield from _spans(inner)
        case _:
            return
