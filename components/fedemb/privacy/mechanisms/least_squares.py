"""One noised round for a linear head: the second moments of everybody's features.

Mehta et al. (TMLR 2023, arXiv 2211.13403). On a frozen backbone nothing else depends on the data,
so nothing is trained step by step and there is no learning rate to tune.
"""

# dp-accounting ships no types.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt
from typing_extensions import override

from fedemb.privacy.mechanisms.mechanism import Cohort, times
from fedemb.privacy.mechanisms.per_unit_sampling import PerUnitSampling, UnitsAloneConfig

if TYPE_CHECKING:
    from dp_accounting import dp_event as dpe

    from fedemb.privacy.mechanisms.section import RunSettings
    from fedemb.privacy.randomness.sampling import Index, VirtualClient


class LeastSquaresConfig(UnitsAloneConfig):
    """A head solved from one noised round: no sampling, no learning rate; sensitivity C."""

    solves_head = True

    kind: Literal["least_squares"] = "least_squares"
    rounds: Annotated[int, Field(ge=1, le=1)] = 1
    """There is one."""
    units_per_round: PositiveInt
    """About how many units there are, a public constant: what the noised sum is divided by."""
    feature_norm: PositiveFloat = 1.0
    """Features of an image that are longer than this are shortened to it."""
    label_weight: Annotated[float, Field(ge=0.125, le=8.0)] = 1.0
    """Length of the part of a record that knows the label, over that of the part that does not."""

    @override
    def check_run(self, config: RunSettings) -> None:
        super().check_run(config)
        if config.task != "classification" or config.model.trainable != "head":
            raise ValueError(
                f"mechanism.kind={self.kind} solves for the head of a classifier, got task="
                f"{config.task} and model.trainable={config.model.trainable}; set task: "
                "classification and model.trainable: head, or name another mechanism"
            )


class LeastSquares(LeastSquaresConfig, PerUnitSampling):
    """Every unit adds one record (u u^T, label_weight x u y^T), of norm at most C, to one sum.

    |u| <= 1 before the products are formed, so the two parts have norms of at most 1 and
    label_weight, and sqrt(1 + label_weight^2) is scaled to C. One Gaussian under
    ADD_OR_REMOVE_ONE; the head is post-processing of the noised sum.
    """

    section = LeastSquaresConfig
    proof = "a unit adds one vector of norm at most C, in the only round"

    @override
    @classmethod
    def section_at(cls, cohort: Cohort, **options: Any) -> dict[str, Any]:
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
    def scaled_sampling(self, population: float, compute: float) -> dict[str, Any]:
        return {"units_per_round": times(self.units_per_round, population)}
