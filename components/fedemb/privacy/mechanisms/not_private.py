"""No noise: a baseline that says so everywhere."""

# dp-accounting ships no types.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

from typing_extensions import override

from fedemb.errors import ConfigError
from fedemb.foundation.section import Probability
from fedemb.privacy.mechanisms.mechanism import Cohort, MechanismPlan, PublicNumbers
from fedemb.privacy.mechanisms.section import MechanismConfig
from fedemb.privacy.randomness.grid import MAX_SUM_BITS, MOST_GRID_BITS

if TYPE_CHECKING:
    from dp_accounting import dp_event as dpe

    from fedemb.privacy.randomness.sampling import Index, VirtualClient


class NotPrivateConfig(MechanismConfig):
    """No noise: a baseline that can never pass the gate."""

    private = False

    kind: Literal["not_private"] = "not_private"
    sampling_probability: Probability
    """Chance of each virtual client in each round."""


class NotPrivate(NotPrivateConfig, MechanismPlan):
    """Samples as the default mechanism does, and adds nothing."""

    section = NotPrivateConfig

    @override
    @classmethod
    def derived(cls, section: Any, numbers: PublicNumbers) -> dict[str, Any]:
        # No noise to hide a coarse grid: take all the bits that sums leave.
        room = MAX_SUM_BITS - math.ceil(math.log2(numbers.virtual_clients + 1))
        return {"grid_bits": min(MOST_GRID_BITS, room)}

    @override
    @classmethod
    def section_at(cls, cohort: Cohort, **options: Any) -> dict[str, Any]:
        return {"sampling_probability": cohort.clients_per_round / cohort.groups}

    @override
    def check(self) -> None:
        if self.noise_multiplier != 0:
            raise ConfigError(f"{self.kind} has no noise; name a mechanism that has")
        super().check()

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

        return dpe.NonPrivateDpEvent()

    @override
    def event_of(self, rounds: int) -> dpe.DpEvent:
        return self.round_event
