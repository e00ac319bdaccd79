"""Users are sampled, then grouped; accounts for grouping after sampling at 2C."""

# dp-accounting ships no types.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from typing_extensions import override

from fedemb.foundation.section import Probability
from fedemb.privacy.mechanisms.grouped_users import GroupedUsers, GroupedUsersConfig
from fedemb.privacy.mechanisms.mechanism import Cohort

if TYPE_CHECKING:
    from fedemb.privacy.randomness.sampling import Index, VirtualClient


class UserPoissonConfig(GroupedUsersConfig):
    """Users are sampled, then assigned to clients_per_round groups; price at 2C."""

    kind: Literal["user_poisson"] = "user_poisson"
    sampling_probability: Probability
    """Sampling probability (q) of each user in each round."""


class UserPoisson(UserPoissonConfig, GroupedUsers):
    """Samples each user with probability q and assigns the user to one of K groups.

    The group of a user is not hidden, and its update changes by up to 2C.
    """

    section = UserPoissonConfig
    proof = "a user changes the update of one group by at most 2C"

    @override
    @classmethod
    def section_at(cls, cohort: Cohort, **options: int | None) -> dict[str, float]:
        drawn = cohort.clients_per_round * cohort.users_per_client
        return {
            "noise_multiplier": cohort.noise_multiplier,
            "clients_per_round": cohort.clients_per_round,
            "sampling_probability": min(1.0, drawn / cohort.population),
        }

    @override
    def sample(self, round_key: bytes, round_index: int, index: Index) -> list[VirtualClient]:
        from fedemb.privacy.randomness.sampling import sample_users_into_groups

        return sample_users_into_groups(
            self.clients_per_round, self.sampling_probability, round_key, index
        )
