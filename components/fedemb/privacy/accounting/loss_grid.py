"""Privacy loss distributions: on which grid of losses, and a quick upper bound for searches.

dp-accounting rounds losses so that epsilon can only come out too large, whatever the grid. So a
coarse grid is never wrong, only generous, and by how much follows from its spacing: rounding adds
at most spacing^2 / 4 to the variance of one round's loss.
"""

# The numeric libraries ship no types; our own signatures are checked.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator

from dp_accounting import NeighboringRelation, pld
from dp_accounting import dp_event as dpe

from fedemb.privacy.accounting.allocation import LossAccountant, RandomAllocationDpEvent
from fedemb.privacy.accounting.events import event_from_json, event_to_json

DISCRETISATION = 1e-4
"""Grid of privacy losses of every guarantee."""
QUICK_TOLERANCE = 1e-3
"""What `quick_epsilon` may be above the figure on the fine grid, relative."""
_FINE_REACH = 100.0
"""Privacy loss of one round up to which the fine grid is used: noise multipliers above 0.24."""
_COARSE_POINTS = 2e6
"""Points of the grid of a whole run beyond that, at most."""
_MIXTURE_POINTS = 200_000
"""Points of the grid of one mixture of Gaussians, at most: each is sought by itself, which takes
15 microseconds."""
_FIRST_GRID = 0.02
"""Where `quick_epsilon` starts."""


def discretisation(event: dpe.DpEvent) -> float:
    """Grid of privacy losses for an event: fine, unless so little noise makes it endless.

    At noise multiplier 0.01 one round's losses reach 20,000, and a grid of 1e-4 would take hours
    and all memory to say that epsilon is enormous. Estimates are pessimistic on any grid.
    """
    reaches = list(_reaches(event, 1))
    finest = max([DISCRETISATION, *(span / _MIXTURE_POINTS for span in _spans(event))])
    if all(reach <= _FINE_REACH for reach, _ in reaches):
        return finest
    return max(finest, sum(reach * times for reach, times in reaches) / _COARSE_POINTS)


def pld_of(event: dpe.DpEvent, relation: NeighboringRelation) -> pld.PLDAccountant:
    """The accountant of an event on its `discretisation`, kept for the next question."""
    return _kept(_key(event), relation)


def quick_epsilon(event: dpe.DpEvent, relation: NeighboringRelation, delta: float) -> float:
    """An upper bound on epsilon, at most `QUICK_TOLERANCE` above the fine grid's, in a tenth of it.

    For curves and searches; no guarantee is stated with it. The grid is refined until it suits the
    epsilon found: over T rounds a spacing of g costs about 2 T g^2 / epsilon (measured, for epsilon
    from 0.02 to 20). It is never finer than `discretisation`, where both figures are one.
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
        epsilon = _composed(event, relation, grid).get_epsilon(delta)
        wanted = max(finest, epsilon * math.sqrt(QUICK_TOLERANCE / 8 / rounds))
        if not wanted < 0.8 * grid:
            return epsilon
        grid = wanted


@functools.lru_cache(maxsize=64)
def _kept(key: str, relation: NeighboringRelation) -> pld.PLDAccountant:
    event = event_from_json(json.loads(key))
    return _composed(event, relation, discretisation(event))


def _composed(event: dpe.DpEvent, relation: NeighboringRelation, grid: float) -> pld.PLDAccountant:
    accountant = LossAccountant(relation, grid)
    try:
        accountant.compose(event)
    except OverflowError:  # losses beyond float64: no privacy worth a number
        accountant.compose(dpe.NonPrivateDpEvent())
    return accountant


def _key(event: dpe.DpEvent) -> str:
    return json.dumps(event_to_json(event))


def _reaches(event: dpe.DpEvent, times: int) -> Iterator[tuple[float, int]]:
    """Largest privacy loss worth counting of each Gaussian inside, and how often it happens."""
    match event:
        case dpe.GaussianDpEvent():
            if event.noise_multiplier > 0:
                yield 2 / event.noise_multiplier**2 + 16 / event.noise_multiplier, times
        case dpe.MixtureOfGaussiansDpEvent():
            yield 0.0, times  # all images at once reach far, with a chance that no grid shows
        case dpe.SelfComposedDpEvent():
            yield from _reaches(event.event, times * event.count)
        case dpe.PoissonSampledDpEvent() | RandomAllocationDpEvent():
            yield from _reaches(event.event, times)
        case dpe.ComposedDpEvent():
            for inner in event.events:
                yield from _reaches(inner, times)
        case _:
            return


def _spans(event: dpe.DpEvent) -> Iterator[float]:
    """Largest privacy loss of each mixture of Gaussians inside, however unlikely."""
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
