"""What mechanisms share that sample units alone: one vector of norm at most C for each."""

from __future__ import annotations

from pydantic import PositiveInt
from typing_extensions import override

from fedemb.privacy.mechanisms.mechanism import MechanismPlan
from fedemb.privacy.mechanisms.section import NoisedConfig
from fedemb.privacy.randomness.grid import MOST_UNITS


class UnitsAloneConfig(NoisedConfig):
    """Each unit, as the policy says what that is, contributes one clipped vector of its own."""

    samples_units = True

    units_per_round: PositiveInt
    """Expected units per round (B), a public constant: what the noised sum is divided by."""


class PerUnitSampling(UnitsAloneConfig, MechanismPlan):
    """No unit shares its contribution with another, or moves another's."""

    @property
    @override
    def normalizer(self) -> float:
        return float(self.units_per_round)

    @property
    @override
    def most_contributions(self) -> int:
        return MOST_UNITS

    @override
    def conservative_event(self) -> None:
        """None: nobody is grouped."""
