"""One noised round for a projection: mean and covariance of the features of each user.

The backbone is frozen, and the projection divides features by their noised covariance within users,
without a learning rate (`fedemb.privacy.queries.covariance_sum`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, PositiveFloat
from typing_extensions import override

from fedemb.privacy.mechanisms.per_unit_sampling import OneRound, OneRoundConfig
from fedemb.privacy.randomness.grid import MOST_IMAGES

if TYPE_CHECKING:
    from fedemb.privacy.mechanisms.section import PublicNumbers


class CovarianceConfig(OneRoundConfig):
    """Projection solved from one noised round, without sampling and rates; sensitivity C."""

    solves = "projection"

    kind: Literal["covariance"] = "covariance"
    covariance_norm: PositiveFloat = 0.1
    """Norm that the covariance of a user's features is clipped to, in units of the squared
    `feature_norm`."""
    mean_weight: Annotated[float, Field(ge=0.05, le=8.0)] = 0.33
    """Norm of the record part with the mean, relative to the part with the covariance."""

    @override
    def check_run(self, numbers: PublicNumbers) -> None:
        super().check_run(numbers)
        needed = {
            "task": (numbers.task, "embedding"),
            "model.trainable": (numbers.trainable, "projection"),
            "policy.unit": (numbers.unit, "user"),
        }
        for name, (found, wanted) in needed.items():
            if found != wanted:
                raise ValueError(
                    f"mechanism.kind={self.kind} solves for the projection of an embedding, got "
                    f"{name}={found}. Set {name}: {wanted}, or another mechanism.kind."
                )
        most = numbers.max_images_per_user
        if most > MOST_IMAGES:
            raise ValueError(
                f"partition.max_images_per_user={most} exceeds the {MOST_IMAGES} images that sum "
                "exactly. Lower it."
            )


class Covariance(CovarianceConfig, OneRound):
    """Adds one record (mean_weight x mean, covariance) per user, of norm at most C, to one sum.

    The parts are clipped to norms of mean_weight and 1, and sqrt(1 + mean_weight^2) is scaled to C.
    The projection is post-processing of the noised sum.
    """

    section = CovarianceConfig
