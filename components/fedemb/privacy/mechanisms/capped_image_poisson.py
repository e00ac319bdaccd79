"""DP-SGD for users, image by image: every image has a coin of its own, a user at most m images.

Charles et al., Fine-tuning LLMs with user-level DP (arXiv 2407.07737), "example-level sampling".
The other way to protect users is to sample them whole, as DP-SGD's own mechanism does.
"""

# dp-accounting ships no types.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import PositiveInt
from typing_extensions import override

from fedemb.foundation.section import Probability
from fedemb.privacy.mechanisms.binomial_mixture import binomial_mixture
from fedemb.privacy.mechanisms.mechanism import Cohort, Comparison, MechanismPlan, PublicNumbers
from fedemb.privacy.mechanisms.section import NoisedConfig
from fedemb.privacy.randomness.grid import MOST_UNITS

if TYPE_CHECKING:
    from dp_accounting import dp_event as dpe

    from fedemb.privacy.mechanisms.section import RunSettings
    from fedemb.privacy.randomness.sampling import Index, VirtualClient


class CappedImagePoissonConfig(NoisedConfig):
    """DP-SGD for users by images sampled alone; sensitivity C for each image of a user."""

    samples_units = True
    samples_images = True

    kind: Literal["capped_image_poisson"] = "capped_image_poisson"
    sampling_probability: Probability
    """Chance (q) of each image in each round."""
    images_per_round: PositiveInt
    """Expected images per round (B), a public constant: what the noised sum is divided by."""

    @override
    def check_run(self, config: RunSettings) -> None:
        super().check_run(config)
        most = config.partition.max_images_per_user
        if config.policy.unit == "image":
            raise ValueError(
                f"mechanism.kind={self.kind} protects users by a cap on their images, got "
                "policy.unit=image; set mechanism.kind: poisson_gaussian, or unit: user"
            )
        if config.task != "classification" or config.training.unit_gradient.images_per_unit != 1:
            raise ValueError(
                f"mechanism.kind={self.kind} sums gradients of single images, got task="
                f"{config.task} and training.unit_gradient.images_per_unit="
                f"{config.training.unit_gradient.images_per_unit}; set task: classification and "
                "images_per_unit: 1"
            )
        if self.images_per_round > most * config.policy.users_lower_bound:
            raise ValueError(
                f"mechanism.images_per_round={self.images_per_round} exceeds {most} images "
                f"(partition.max_images_per_user) of each of the {config.policy.users_lower_bound} "
                "users the policy promises; lower it"
            )
        if most * config.policy.users_lower_bound > MOST_UNITS:
            raise ValueError(
                f"partition.max_images_per_user={most} of each of the "
                f"{config.policy.users_lower_bound} users the policy promises are more images than "
                f"the {MOST_UNITS} that one exact sum has room for; lower "
                "partition.max_images_per_user"
            )


class CappedImagePoisson(CappedImagePoissonConfig, MechanismPlan):
    """A user's images take part each with probability q, alone, one vector of norm <= C each.

    A user has at most m images. Their coins are independent, so the user adds the sum of a random
    set of at most m vectors, of norm at most C times its size: a mixture of Gaussians, which is
    dominated by the one-dimensional mixture at 0, C, ..., mC with binomial chances
    (docs/privacy/sensitivity.md#rule-j).
    """

    section = CappedImagePoissonConfig
    proof = "a user adds one vector of norm at most C for each of at most m sampled images"

    images_per_user: PositiveInt = 1
    """Images of a user at most (m)."""

    @override
    @classmethod
    def derived(cls, section: Any, numbers: PublicNumbers) -> dict[str, Any]:
        return {"images_per_user": numbers.max_images_per_user}

    @override
    @classmethod
    def section_at(cls, cohort: Cohort, **options: Any) -> dict[str, Any]:
        return {
            "noise_multiplier": cohort.noise_multiplier,
            "sampling_probability": min(1.0, cohort.clients_per_round / cohort.groups),
            "images_per_round": cohort.clients_per_round,
        }

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
        """None: no user shares a contribution with another."""

    @override
    def comparisons(self) -> tuple[Comparison, ...]:
        """Users sampled whole, at the same noise on the mean: m times fewer records."""
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
