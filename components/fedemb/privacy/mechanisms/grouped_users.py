"""Base of mechanisms that sample users and then group them: a group changes by up to 2C."""

# dp-accounting ships no types.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import PositiveInt
from typing_extensions import override

from fedemb.foundation.section import Probability
from fedemb.privacy.mechanisms.mechanism import MechanismPlan
from fedemb.privacy.mechanisms.section import AdaptiveClipConfig, NoisedConfig

if TYPE_CHECKING:
    from dp_accounting import dp_event as dpe


class GroupedUsersConfig(NoisedConfig):
    """Users are sampled in every round and grouped into virtual clients; price at 2C."""

    clients_per_round: PositiveInt
    """Number of groups (K) of sampled users; the normalizer."""
    adaptive_clip: AdaptiveClipConfig | None = None
    """Null: the clip is `l2_norm_clip` in every round; else `l2_norm_clip` is the initial clip."""


class GroupedUsers(GroupedUsersConfig, MechanismPlan):
    """Mechanism in which a sampled user changes the update of a group by up to 2C."""

    sampling_probability: Probability
    """Sampling probability of a user in a round."""

    @property
    @override
    def normalizer(self) -> float:
        return float(self.clients_per_round)

    @property
    @override
    def most_contributions(self) -> int:
        return self.clients_per_round

    @property
    @override
    def round_event(self) -> dpe.DpEvent:
        from dp_accounting import dp_event as dpe

        return dpe.PoissonSampledDpEvent(
            self.sampling_probability, dpe.GaussianDpEvent(self.joint_noise_multiplier / 2)
        )
