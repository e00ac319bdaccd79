"""One noised round for a linear head: the second moments of the features of all units.

Mehta et al. (TMLR 2023, arXiv 2211.13403). The backbone is frozen, and the head is solved in closed
form, without a learning rate.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field
from typing_extensions import override

from fedemb.privacy.mechanisms.per_unit_sampling import OneRound, OneRoundConfig

if TYPE_CHECKING:
    from fedemb.privacy.mechanisms.section import PublicNumbers


class LeastSquaresConfig(OneRoundConfig):
    """Head solved from one noised round, without sampling and learning rate; sensitivity C."""

    solves = "head"

    kind: Literal["least_squares"] = "least_squares"
    label_weight: Annotated[float, Field(ge=0.125, le=8.0)] = 1.0
    """Norm of the record part with labels, relative to the part without labels."""

    @override
    def check_run(self, numbers: PublicNumbers) -> None:
        super().check_run(numbers)
        if numbers.task != "classification" or numbers.trainable != "head":
            raise ValueError(
                f"mechanism.kind={self.kind} solves for the head of a classifier, got task="
                f"{numbers.task} and model.trainable={numbers.trainable}. Set task: "
                "classification and model.trainable: head, or set another mechanism.kind."
            )


class LeastSquares(LeastSquaresConfig, OneRound):
    """Adds one record (u u^T, label_weight x u y^T) per unit, of norm at most C, to one sum.

    |u| <= 1 before the products are formed, so the two parts have norms of at most 1 and
    label_weight, and sqrt(1 + label_weight^2) is scaled to C. The head is post-processing of the
    noised sum.
    """

    section = LeastSquaresConfig
