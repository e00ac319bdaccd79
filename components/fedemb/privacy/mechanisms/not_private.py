"""Baseline without noise; reports and gate treat it as not private."""

# dp-accounting ships no types.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from typing_extensions import override

from fedemb.errors import ConfigError
from fedemb.foundation.section import Probability
from fedemb.privacy.mechanisms.mechanism import MechanismPlan
from fedemb.privacy.mechanisms.section import MechanismConfig, PublicNumbers
from fedemb.privacy.randomness.grid import MAX_SUM_BITS, MOST_GRID_BITS

if TYPE_CHECKING:
    from dp_accounting import dp_event as dpe

    from fedemb.privacy.randomness.sampling import Index, VirtualClient


class NotPrivateConfig(MechanismConfig):
    """Baseline without noise; the gate always denies it."""

    private = False

    kind: Literal["not_private"] = "not_private"
    sampling_probability: Probability
    """Sampling probability of each virtual client in each round."""


class NotPrivate(NotPrivateConfig, MechanismPlan):
    """Samples like the default mechanism and adds no noise."""

    section = NotPrivateConfig

    @override
    @classmethod
    def derived(cls, section: MechanismConfig, numbers: PublicNumbers) -> dict[str, object]:
        # Without noise a coarse grid is visible: use all bits that sums leave.
        room = MAX_SUM_BITS - math.ceil(math.log2(numbers.virtual_clients + 1))
        return {"grid_bits": min(MOST_GRID_BITS, room)}

    @override
    def check(self) -> None:
        if self.noise_multiplier != 0:
            raise ConfigError(
                f"{self.kind} adds no noise. Remove noise_multiplier, or set another kind."
            )
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
