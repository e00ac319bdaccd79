"""Bases of mechanisms that sample units independently: one vector of norm at most C each."""

# dp-accounting ships no types.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field, PositiveFloat, PositiveInt
from typing_extensions import override

from fedemb.privacy.mechanisms.mechanism import MechanismPlan, times
from fedemb.privacy.mechanisms.section import NoisedConfig
from fedemb.privacy.randomness.grid import MOST_UNITS

if TYPE_CHECKING:
    from dp_accounting import dp_event as dpe

    from fedemb.privacy.randomness.sampling import Index, VirtualClient


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


class OneRoundConfig(UnitsAloneConfig):
    """Every unit contributes to the only round."""

    rounds: Annotated[int, Field(ge=1, le=1)] = 1
    """Always 1."""
    units_per_round: PositiveInt
    """Expected number of units, a public constant that divides the noised sum."""
    feature_norm: PositiveFloat = 1.0
    """Norm that longer features of an image are clipped to."""


class OneRound(OneRoundConfig, PerUnitSampling):
    """Mechanism whose only round is one Gaussian of all units, under ADD_OR_REMOVE_ONE."""

    proof = "a unit adds one vector of norm at most C, in the only round"

    @override
    def sample(self, round_key: bytes, round_index: int, index: Index) -> list[VirtualClient]:
        from fedemb.privacy.randomness.sampling import sample_units

        return sample_units(1.0, round_key, index)

    @property
    @override
    def round_event(self) -> dpe.DpEvent:
        from dp_accounting import dp_event as dpe

        return dpe.GaussianDpEvent(self.noise_multiplier)

    @override
    def event_of(self, rounds: int) -> dpe.DpEvent:
        return self.round_event

    @override
    def scaled_sampling(self, population: float, compute: float) -> dict[str, float]:
        return {"units_per_round": times(self.units_per_round, population)}
