"""The known bugs as patches to the product, and the tests that must turn red on each."""

from __future__ import annotations

from tests.planted_bugs.mutants import (
    accelerators,
    embeddings,
    gate,
    limits,
    mechanism,
    steps,
    survivors,
    training,
    trust,
    units,
)
from tests.planted_bugs.mutants.places import AGAIN, COINS, PROBE, REPLAY
from tests.planted_bugs.mutation import Mutant

SOUND = Mutant(1, "nothing_planted", (), (*REPLAY, *PROBE, *AGAIN, *COINS))
"""The control: the copy without a bug must be green."""

MUTANTS = (
    SOUND,
    *mechanism.MUTANTS,
    *training.MUTANTS,
    *steps.MUTANTS,
    *embeddings.MUTANTS,
    *units.MUTANTS,
    *accelerators.MUTANTS,
    *gate.MUTANTS,
    *survivors.MUTANTS,
    *trust.MUTANTS,
    *limits.MUTANTS,
)
