"""What mechanisms share that draw users and then group them: a group moves by up to 2C."""

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
    """Users are drawn in every round and cut into virtual clients; priced at 2C."""

    clients_per_round: PositiveInt
    """Groups (K) the drawn users fall into; the normalizer."""
    adaptive_clip: AdaptiveClipConfig | None = None
    """Null: the clip is `l2_norm_clip` in every round; else that is where it starts."""


class GroupedUsers(GroupedUsersConfig, MechanismPlan):
    """A user takes part with some chance and changes the update of a group that is there anyway."""

    sampling_probability: Probability
    """Chance of a user in a round."""

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
