"""One noised round for a linear head: the second moments of the features of all units.

Mehta et al. (TMLR 2023, arXiv 2211.13403). The backbone is frozen, and the head is solved in closed
form, without a learning rate.
"""

# dp-accounting ships no types.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt
from typing_extensions import override

from fedemb.privacy.mechanisms.mechanism import Cohort, times
from fedemb.privacy.mechanisms.per_unit_sampling import PerUnitSampling, UnitsAloneConfig

if TYPE_CHECKING:
    from dp_accounting import dp_event as dpe

    from fedemb.privacy.mechanisms.section import RunSettings
    from fedemb.privacy.randomness.sampling import Index, VirtualClient


class LeastSquaresConfig(UnitsAloneConfig):
    """Head solved from one noised round, without sampling and learning rate; sensitivity C."""

    solves_head = True

    kind: Literal["least_squares"] = "least_squares"
    rounds: Annotated[int, Field(ge=1, le=1)] = 1
    """Always 1."""
    units_per_round: PositiveInt
    """Expected number of units, a public constant that divides the noised sum."""
    feature_norm: PositiveFloat = 1.0
    """Norm that longer features of an image are clipped to."""
    label_weight: Annotated[float, Field(ge=0.125, le=8.0)] = 1.0
    """Norm of the record part with labels, relative to the part without labels."""

    @override
    def check_run(self, config: RunSettings) -> None:
        super().check_run(config)
        if config.task != "classification" or config.model.trainable != "head":
            raise ValueError(
                f"mechanism.kind={self.kind} solves for the head of a classifier, got task="
                f"{config.task} and model.trainable={config.model.trainable}. Set task: "
                "classification and model.trainable: head, or set another mechanism.kind."
            )


class LeastSquares(LeastSquaresConfig, PerUnitSampling):
    """Adds one record (u u^T, label_weight x u y^T) per unit, of norm at most C, to one sum.

    |u| <= 1 before the products are formed, so the two parts have norms of at most 1 and
    label_weight, and sqrt(1 + label_weight^2) is scaled to C. One Gaussian under
    ADD_OR_REMOVE_ONE; the head is post-processing of the noised sum.
    """

    section = LeastSquaresConfig
    proof = "a unit adds one vector of norm at most C, in the only round"

    @override
    @classmethod
    def section_at(cls, cohort: Cohort, **options: int | None) -> dict[str, float]:
        return {
            "rounds": 1,
            "noise_multiplier": cohort.noise_multiplier,
            "units_per_round": cohort.population,
        }

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
