"""User-level DP-SGD that samples images independently, at most m images of a user.

Charles et al., Fine-tuning LLMs with user-level DP (arXiv 2407.07737), "example-level sampling".
DP-SGD's own mechanism samples whole users instead.
"""

# dp-accounting ships no types.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import PositiveInt
from typing_extensions import override

from fedemb.foundation.section import Probability
from fedemb.privacy.accounting.binomial_mixture import binomial_mixture
from fedemb.privacy.mechanisms.mechanism import Comparison, MechanismPlan
from fedemb.privacy.mechanisms.section import MechanismConfig, NoisedConfig, PublicNumbers
from fedemb.privacy.randomness.grid import MOST_UNITS

if TYPE_CHECKING:
    from dp_accounting import dp_event as dpe

    from fedemb.privacy.randomness.sampling import Index, VirtualClient


class CappedImagePoissonConfig(NoisedConfig):
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

    images_per_user: PositiveInt = 1
    """Maximum number of images of a user (m)."""

    @override
    @classmethod
    def derived(cls, section: MechanismConfig, numbers: PublicNumbers) -> dict[str, object]:
        return {"images_per_user": numbers.max_images_per_user}

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

    @override
    def sample(self, round_key: bytes, round_index: int, index: Index) -> list[VirtualClient]:
        from fedemb.privacy.randomness.sampling import sample_images

        return sample_images(self.images_per_user, self.sampling_probability, round_key, index)

    @property
    @override
    def round_event(self) -> dpe.DpEvent:
        return binomial_mixture(
            self.images_per_user, self.sampling_probability, self.noise_multiplier
        )

    @override
    def conservative_event(self) -> None:
        """Returns None: the mechanism does not group users."""

    @override
    def comparisons(self) -> tuple[Comparison, ...]:
        """Returns the event of whole sampled users, with m times fewer records, same noise."""
        from dp_accounting import dp_event as dpe

        whole = dpe.GaussianDpEvent(self.noise_multiplier / self.images_per_user)
        round_event = dpe.PoissonSampledDpEvent(self.sampling_probability, whole)
        return (
            Comparison(
                name="users_sampled",
                event=dpe.SelfComposedDpEvent(round_event, self.rounds),
                relation=self.relation,
            ),
        )
