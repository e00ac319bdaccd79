"""Mechanisms that sample units alone: one vector of norm at most C each."""

# The numeric libraries are not fully typed; the project's own signatures are checked.
# pyright: reportMissingTypeStubs=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import PositiveInt
from typing_extensions import override

from fedemb.foundation.section import Probability
from fedemb.privacy.mechanism import MechanismPlan, times
from fedemb.privacy.section import MOST_IMAGES, MOST_UNITS, MechanismConfig, PublicNumbers

if TYPE_CHECKING:
    from dp_accounting import dp_event as dpe


def binomial_mixture(images: int, probability: float, noise_multiplier: float) -> dpe.DpEvent:
    """Returns the event of a sum of a binomial number of unit vectors, in Gaussian noise.

    Counts with a probability below 5e-324 are omitted, because no delta is that small.

    Args:
      images: maximum number of images of a user.
      probability: sampling probability of each image.
      noise_multiplier: standard deviation of the noise.
    """
    import numpy as np
    from dp_accounting import dp_event as dpe
    from scipy.stats import binom

    chances = binom.pmf(np.arange(images + 1), images, probability)
    counts = np.flatnonzero(chances)
    return dpe.MixtureOfGaussiansDpEvent(
        noise_multiplier,
        [float(count) for count in counts],
        (chances[counts] / chances.sum()).tolist(),
    )


# Bases of mechanisms that sample units independently: one vector of norm at most C each.


class PerUnitSamplingConfig(MechanismConfig):
    """Each unit of the policy contributes one separate clipped vector."""

    samples_units = True

    units_per_round: PositiveInt
    """Expected units per round (B), a public constant that divides the noised sum."""


class PerUnitSampling(PerUnitSamplingConfig, MechanismPlan):
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


# DP-SGD's mechanism: each unit is sampled independently and contributes one clipped vector.
#
# De et al. (arXiv 2204.13650) and Abadi et al. (arXiv 1607.00133). The policy defines the unit:
# one user with all of their data, or one image.


class PoissonGaussianConfig(PerUnitSamplingConfig):
    """DP-SGD: independently sampled units, one clipped vector each; sensitivity C."""

    kind: Literal["poisson_gaussian"] = "poisson_gaussian"
    sampling_probability: Probability
    """Sampling probability (q) of each unit in each round; 1 is full batch."""

    @override
    def check_run(self, numbers: PublicNumbers) -> None:
        super().check_run(numbers)
        population = numbers.users_lower_bound
        if self.units_per_round > population:
            raise ValueError(
                f"mechanism.units_per_round={self.units_per_round} exceeds "
                f"policy.users_lower_bound={population}. Set it to sampling_probability times "
                "users_lower_bound."
            )


class PoissonGaussian(PoissonGaussianConfig, PerUnitSampling):
    """Samples each unit with probability q; each adds one vector of norm at most C.

    Coins are independent of data and of each other, and no unit's integers depend on another unit.
    A round on two data sets that differ by one unit therefore compares N(0) with (1 - q) N(0) +
    q N(c), |c| <= C, both shifted by the other units: the Poisson-sampled Gaussian under
    ADD_OR_REMOVE_ONE. With q = 1, the rounds compose to one Gaussian.
    """

    section = PoissonGaussianConfig
    proof = "a unit is sampled alone and adds one vector of norm at most C"

    @property
    @override
    def round_event(self) -> dpe.DpEvent:
        from dp_accounting import dp_event as dpe

        gaussian = dpe.GaussianDpEvent(self.noise_multiplier)
        if self.sampling_probability == 1:
            return gaussian
        return dpe.PoissonSampledDpEvent(self.sampling_probability, gaussian)


# User-level DP-SGD that samples images independently, at most m images of a user.
#
# Charles et al., Fine-tuning LLMs with user-level DP (arXiv 2407.07737), "example-level
# sampling". DP-SGD's own mechanism samples whole users instead.


class CappedImagePoissonConfig(MechanismConfig):
    """User-level DP-SGD by independently sampled images; sensitivity C per image of a user."""

    samples_units = True
    samples_images = True

    kind: Literal["capped_image_poisson"] = "capped_image_poisson"
    sampling_probability: Probability
    """Sampling probability (q) of each image in each round."""
    images_per_round: PositiveInt
    """Expected images per round (B), a public constant that divides the noised sum."""

    @override
    def check_run(self, numbers: PublicNumbers) -> None:
        super().check_run(numbers)
        most = numbers.max_images_per_user
        if numbers.unit == "image":
            raise ValueError(
                f"mechanism.kind={self.kind} protects users by a cap on their images, got "
                "policy.unit=image. Set mechanism.kind: poisson_gaussian, or policy.unit: user."
            )
        if numbers.task != "classification" or numbers.images_per_unit != 1:
            raise ValueError(
                f"mechanism.kind={self.kind} sums gradients of single images, got task="
                f"{numbers.task} and training.unit_gradient.images_per_unit="
                f"{numbers.images_per_unit}; set task: classification and "
                "images_per_unit: 1"
            )
        if self.images_per_round > most * numbers.users_lower_bound:
            raise ValueError(
                f"mechanism.images_per_round={self.images_per_round} exceeds {most} images "
                f"(partition.max_images_per_user) of each of the {numbers.users_lower_bound} "
                "users the policy promises; lower it"
            )
        if most * numbers.users_lower_bound > MOST_UNITS:
            raise ValueError(
                f"partition.max_images_per_user={most} of each of the "
                f"{numbers.users_lower_bound} users the policy promises are more images than "
                f"the {MOST_UNITS} that one exact sum has room for; lower "
                "partition.max_images_per_user"
            )


class CappedImagePoisson(CappedImagePoissonConfig, MechanismPlan):
    """Samples each image with probability q; each contributes one vector of norm at most C.

    A user has at most m images with independent coins. The user adds the sum of a random set of at
    most m vectors, of norm at most C times its size: a mixture of Gaussians, which is dominated by
    the one-dimensional mixture at 0, C, ..., mC with binomial probabilities
    (docs/privacy/sensitivity.md#rule-j).
    """

    section = CappedImagePoissonConfig
    proof = "a user adds one vector of norm at most C for each of at most m sampled images"

    @property
    @override
    def normalizer(self) -> float:
        return float(self.images_per_round)

    @property
    @override
    def most_contributions(self) -> int:
        return MOST_UNITS

    @property
    @override
    def user_contributions(self) -> int:
        return self.images_per_user

    @property
    @override
    def round_event(self) -> dpe.DpEvent:
        return binomial_mixture(
            self.images_per_user, self.sampling_probability, self.noise_multiplier
        )

    @override
    def conservative_event(self) -> None:
        """Returns None: the mechanism does not group users."""


# One noised round for a projection: mean and covariance of the features of each user.
#
# The backbone is frozen, and the projection divides features by their noised covariance within
# users, without a learning rate (`fedemb.privacy.feature_sums`).


class CovarianceConfig(PerUnitSamplingConfig):
    """Projection solved from one noised round, without sampling and rates; sensitivity C."""

    solves = True
    units_per_round: PositiveInt
    """Expected number of units, a public constant that divides the noised sum."""
    rounds: Literal[1] = 1  # pyright: ignore[reportIncompatibleVariableOverride]
    """Always 1."""

    kind: Literal["covariance"] = "covariance"

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


class Covariance(  # pyright: ignore[reportIncompatibleVariableOverride]
    CovarianceConfig, PerUnitSampling
):
    """Adds one record (mean_weight x mean, covariance) per user, of norm at most C, to one sum.

    The parts are clipped to norms of mean_weight and 1, and sqrt(1 + mean_weight^2) is scaled to C.
    The projection is post-processing of the noised sum.
    """

    section = CovarianceConfig
    proof = "a unit adds one vector of norm at most C, in the only round"

    @property
    @override
    def chance(self) -> float:
        return 1.0

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
