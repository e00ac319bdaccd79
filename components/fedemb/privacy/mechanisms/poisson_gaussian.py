"""DP-SGD's mechanism: every unit has a coin of its own and contributes one clipped vector.

De et al. (arXiv 2204.13650) and Abadi et al. (arXiv 1607.00133). A unit is what the policy says:
one user with everything they own, or one image.
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
from fedemb.privacy.mechanisms.mechanism import Cohort, Comparison, PublicNumbers
from fedemb.privacy.mechanisms.per_unit_sampling import PerUnitSampling, UnitsAloneConfig
from fedemb.privacy.mechanisms.section import AdaptiveClipConfig

if TYPE_CHECKING:
    from dp_accounting import dp_event as dpe

    from fedemb.privacy.mechanisms.section import RunSettings
    from fedemb.privacy.randomness.sampling import Index, VirtualClient


class PoissonGaussianConfig(UnitsAloneConfig):
    """DP-SGD: units are sampled alone, one clipped vector each; sensitivity C."""

    kind: Literal["poisson_gaussian"] = "poisson_gaussian"
    sampling_probability: Probability
    """Chance (q) of each unit in each round; 1 takes all of them (full batch)."""
    adaptive_clip: AdaptiveClipConfig | None = None
    """Null: the clip is `l2_norm_clip` in every round; else that is where it starts."""

    @override
    def check_run(self, config: RunSettings) -> None:
        super().check_run(config)
        population = config.policy.users_lower_bound
        if self.units_per_round > population:
            raise ValueError(
                f"mechanism.units_per_round={self.units_per_round} exceeds the "
                f"{population} units the policy promises (policy.users_lower_bound); lower it, to "
                "sampling_probability times that number"
            )


class PoissonGaussian(PoissonGaussianConfig, PerUnitSampling):
    """Each unit takes part with probability q, alone, and adds one vector of norm at most C.

    Coins are independent of data and of each other, and no unit's integers depend on another unit.
    So a round on two data sets that differ by one unit is N(0) against (1 - q) N(0) + q N(c) with
    |c| <= C, shifted by what the others add: the Poisson-sampled Gaussian under ADD_OR_REMOVE_ONE.
    With q = 1 nothing is sampled, and the rounds compose to one Gaussian.
    """

    section = PoissonGaussianConfig
    proof = "a unit is sampled alone and adds one vector of norm at most C"

    images_per_unit: PositiveInt = 1
    """Images of a unit at most, for the price of sampling them one by one."""

    @override
    @classmethod
    def derived(cls, section: Any, numbers: PublicNumbers) -> dict[str, Any]:
        return {"images_per_unit": 1 if numbers.unit == "image" else numbers.max_images_per_user}

    @override
    @classmethod
    def section_at(cls, cohort: Cohort, **options: Any) -> dict[str, Any]:
        return {
            "noise_multiplier": cohort.noise_multiplier,
            "sampling_probability": min(1.0, cohort.clients_per_round / cohort.groups),
            "units_per_round": cohort.clients_per_round,
        }

    @override
    def sample(self, round_key: bytes, round_index: int, index: Index) -> list[VirtualClient]:
        from fedemb.privacy.randomness.sampling import sample_units

        return sample_units(self.sampling_probability, round_key, index)

    @property
    @override
    def round_event(self) -> dpe.DpEvent:
        from dp_accounting import dp_event as dpe

        gaussian = dpe.GaussianDpEvent(self.joint_noise_multiplier)
        if self.sampling_probability == 1:
            return gaussian
        return dpe.PoissonSampledDpEvent(self.sampling_probability, gaussian)

    @override
    def comparisons(self) -> tuple[Comparison, ...]:
        """Images sampled one by one, at most m of a user, at the same noise on the mean.

        A user then adds between none and m clipped images, as many as coins come up: a mixture of
        Gaussians (Charles et al., arXiv 2407.07737). m times as many records carry m times the
        noise.
        """
        from dp_accounting import dp_event as dpe

        most = self.images_per_unit
        if self.unit != "user" or most == 1 or self.adaptive_clip is not None:
            return ()
        mixture = binomial_mixture(most, self.sampling_probability, self.noise_multiplier * most)
        return (
            Comparison(
                name="images_sampled",
                event=dpe.SelfComposedDpEvent(mixture, self.rounds),
                relation=self.relation,
            ),
        )
