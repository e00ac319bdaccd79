"""Base of mechanisms that sample units independently: one vector of norm at most C each."""

from __future__ import annotations

from pydantic import PositiveInt
from typing_extensions import override

from fedemb.privacy.mechanisms.mechanism import MechanismPlan
from fedemb.privacy.mechanisms.section import NoisedConfig
from fedemb.privacy.randomness.grid import MOST_UNITS


class UnitsAloneConfig(NoisedConfig):
    """Each unit of the policy contributes one separate clipped vector."""

    samples_units = True

    units_per_round: PositiveInt
    """Expected units per round (B), a public constant that divides the noised sum."""


class PerUnitSampling(UnitsAloneConfig, MechanismPlan):
    """Mechanism in which no unit changes the contribution of another unit."""

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
        """Returns None: the mechanism does not group users."""
