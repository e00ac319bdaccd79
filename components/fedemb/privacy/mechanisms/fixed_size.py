"""The paper's sampler: a fixed number of users without replacement, in virtual clients."""

# dp-accounting ships no types.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import PositiveInt
from typing_extensions import override

from fedemb.foundation.section import Probability
from fedemb.privacy.mechanisms.grouped_users import GroupedUsers, GroupedUsersConfig
from fedemb.privacy.mechanisms.mechanism import Cohort, PublicNumbers, times
from fedemb.privacy.mechanisms.section import MechanismConfig

if TYPE_CHECKING:
    from fedemb.privacy.randomness.sampling import Index, VirtualClient


class FixedSizeConfig(GroupedUsersConfig):
    """The paper's sampler: a fixed number of users without replacement, in groups; price at 2C."""

    kind: Literal["fixed_size"] = "fixed_size"
    users_per_client: PositiveInt
    """Users (M) per group."""


class FixedSize(FixedSizeConfig, GroupedUsers):
    """Draws K * M users without replacement, in K groups of M; a user changes one by up to 2C."""

    section = FixedSizeConfig
    proof = "a user is drawn with chance K M / n and changes one group by at most 2C"
    samples_by_index = True

    sampling_probability: Probability
    """Sampling probability of a user in a round: K M / users_lower_bound."""
    users_lower_bound: PositiveInt
    """Minimum number of slots that the sampler draws from."""

    @override
    @classmethod
    def derived(cls, section: MechanismConfig, numbers: PublicNumbers) -> dict[str, object]:
        assert isinstance(section, FixedSizeConfig)
        drawn = section.clients_per_round * section.users_per_client
        return {
            "sampling_probability": drawn / numbers.users_lower_bound,
            "users_lower_bound": numbers.users_lower_bound,
        }

    @override
    @classmethod
    def section_at(cls, cohort: Cohort, **options: int | None) -> dict[str, float]:
        return {
            "noise_multiplier": cohort.noise_multiplier,
            "clients_per_round": cohort.clients_per_round,
            "users_per_client": cohort.users_per_client,
        }

    @override
    def sample(self, round_key: bytes, round_index: int, index: Index) -> list[VirtualClient]:
        from fedemb.privacy.randomness.sampling import sample_slots

        return sample_slots(
            self.clients_per_round,
            self.users_per_client,
            self.users_lower_bound,
            round_key,
            index,
        )

    @override
    def scaled_sampling(self, population: float, compute: float) -> dict[str, float]:
        users = times(self.users_lower_bound, population)
        return {**super().scaled_sampling(population, compute), "users_lower_bound": users}
