"""DP-SGD's mechanism: each unit is sampled independently and contributes one clipped vector.

De et al. (arXiv 2204.13650) and Abadi et al. (arXiv 1607.00133). The policy defines the unit: one
user with all of their data, or one image.
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
from fedemb.privacy.mechanisms.mechanism import Comparison
from fedemb.privacy.mechanisms.per_unit_sampling import PerUnitSampling, UnitsAloneConfig
from fedemb.privacy.mechanisms.section import MechanismConfig, PublicNumbers

if TYPE_CHECKING:
    from dp_accounting import dp_event as dpe

    from fedemb.privacy.randomness.sampling import Index, VirtualClient


class PoissonGaussianConfig(UnitsAloneConfig):
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

    images_per_unit: PositiveInt = 1
    """Maximum number of images of a unit, for the comparison with sampled images."""

    @override
    @classmethod
    def derived(cls, section: MechanismConfig, numbers: PublicNumbers) -> dict[str, object]:
        return {"images_per_unit": 1 if numbers.unit == "image" else numbers.max_images_per_user}

    @override
    def sample(self, round_key: bytes, round_index: int, index: Index) -> list[VirtualClient]:
        from fedemb.privacy.randomness.sampling import sample_units

        return sample_units(self.sampling_probability, round_key, index)

    @property
    @override
    def round_event(self) -> dpe.DpEvent:
        from dp_accounting import dp_event as dpe

        gaussian = dpe.GaussianDpEvent(self.noise_multiplier)
        if self.sampling_probability == 1:
            return gaussian
        return dpe.PoissonSampledDpEvent(self.sampling_probability, gaussian)

    @override
    def comparisons(self) -> tuple[Comparison, ...]:
        """Returns the event of independently sampled images, at most m of a user, same noise.

        A user then adds a binomial number of at most m clipped images: a mixture of Gaussians
        (Charles et al., arXiv 2407.07737). m times as many records have m times the noise.
        """
        from dp_accounting import dp_event as dpe

        most = self.images_per_unit
        if self.unit != "user" or most == 1:
            return ()
        mixture = binomial_mixture(most, self.sampling_probability, self.noise_multiplier * most)
        return (
            Comparison(
                name="images_sampled",
                event=dpe.SelfComposedDpEvent(mixture, self.rounds),
                relation=self.relation,
            ),
        )
