"""The default mechanism: whole virtual clients are sampled independently."""

# dp-accounting ships no types.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from typing_extensions import override

from fedemb.foundation.section import Probability
from fedemb.privacy.mechanisms.mechanism import MechanismPlan
from fedemb.privacy.mechanisms.section import NoisedConfig

if TYPE_CHECKING:
    from dp_accounting import dp_event as dpe

    from fedemb.privacy.randomness.sampling import Index, VirtualClient


class GroupPoissonGaussianConfig(NoisedConfig):
    """Default: whole virtual clients are sampled independently, docs/privacy/theorem.md."""

    kind: Literal["group_poisson_gaussian"] = "group_poisson_gaussian"
    sampling_probability: Probability
    """Sampling probability (q) of each virtual client in each round."""


class GroupPoissonGaussian(GroupPoissonGaussianConfig, MechanismPlan):
    """Samples each virtual client with probability q, regardless of its users; sensitivity C."""

    section = GroupPoissonGaussianConfig
    relation_name = "REPLACE_ONE"
    proof = "the theorem on sampling whole virtual clients"

    @property
    @override
    def normalizer(self) -> float:
        return self.sampling_probability * self.virtual_clients

    @override
    def sample(self, round_key: bytes, round_index: int, index: Index) -> list[VirtualClient]:
        from fedemb.privacy.randomness.sampling import sample_groups

        return sample_groups(self, self.sampling_probability, round_key, round_index, index)

    @property
    @override
    def round_event(self) -> dpe.DpEvent:
        from dp_accounting import dp_event as dpe

        return dpe.PoissonSampledDpEvent(
            self.sampling_probability, dpe.GaussianDpEvent(self.noise_multiplier)
        )

    @override
    def conservative_event(self) -> dpe.DpEvent:
        from dp_accounting import dp_event as dpe

        gaussian = dpe.GaussianDpEvent(self.noise_multiplier / 2)
        sampled = dpe.PoissonSampledDpEvent(self.sampling_probability, gaussian)
        return dpe.SelfComposedDpEvent(sampled, self.rounds)
