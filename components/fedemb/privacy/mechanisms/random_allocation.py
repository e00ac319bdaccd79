"""Random allocation: each unit participates in one secret round of each epoch.

Balls and bins (Chua et al., arXiv 2412.16802), with exact accounting (Feldman and Shenfeld, ICML
2026, arXiv 2602.17284). Participation is as even as in shuffled epochs.
"""

# dp-accounting ships no types.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import PositiveInt
from typing_extensions import override

from fedemb.errors import ConfigError
from fedemb.privacy.mechanisms.mechanism import Cohort, times
from fedemb.privacy.mechanisms.per_unit_sampling import PerUnitSampling, UnitsAloneConfig

if TYPE_CHECKING:
    from dp_accounting import dp_event as dpe

    from fedemb.privacy.randomness.sampling import Index, Sampler, VirtualClient


class RandomAllocationConfig(UnitsAloneConfig):
    """DP-SGD in epochs: each unit in exactly one round of each epoch; sensitivity C."""

    kind: Literal["random_allocation"] = "random_allocation"
    rounds_per_epoch: PositiveInt
    """Rounds per epoch (t); must divide `rounds`."""


class RandomAllocation(RandomAllocationConfig, PerUnitSampling):
    """Assigns each unit to one round of each epoch; it adds one vector of norm at most C there.

    The round of each unit is drawn independently, so no unit affects another. The sums of an epoch
    are a mixture over its rounds of N(c) in one round and N(0) in the others, compared with N(0) in
    all, |c| <= C. Each sum is post-processing of a one-dimensional sum that changes by exactly C,
    and so is the epoch, also if a round depends on the outputs of earlier rounds.
    """

    section = RandomAllocationConfig
    proof = "a unit adds one vector of norm at most C in one secret round of each epoch"

    @override
    @classmethod
    def section_at(cls, cohort: Cohort, **options: int | None) -> dict[str, float]:
        epoch = max(1, round(cohort.groups / cohort.clients_per_round))
        return {
            "rounds": epoch * max(1, round(cohort.rounds / epoch)),
            "noise_multiplier": cohort.noise_multiplier,
            "rounds_per_epoch": epoch,
            "units_per_round": cohort.clients_per_round,
        }

    @override
    def check(self) -> None:
        super().check()
        if self.rounds % self.rounds_per_epoch:
            raise ConfigError(
                f"mechanism.rounds={self.rounds} must be a multiple of rounds_per_epoch="
                f"{self.rounds_per_epoch}, because part of an epoch costs as much as a whole epoch."
                " Change either."
            )

    @override
    def sampler(self, coin_key: bytes) -> Sampler:
        from fedemb.privacy.randomness.sampling import AllocationSampler

        return AllocationSampler(self, coin_key, self.rounds_per_epoch)

    @override
    def sample(self, round_key: bytes, round_index: int, index: Index) -> list[VirtualClient]:
        raise NotImplementedError("rounds of an epoch share one key; call `sampler`")

    @property
    @override
    def round_event(self) -> dpe.DpEvent:
        from dp_accounting import dp_event as dpe

        return dpe.UnsupportedDpEvent()

    @override
    def event_of(self, rounds: int) -> dpe.DpEvent:
        from dp_accounting import dp_event as dpe

        from fedemb.privacy.accounting.events import RandomAllocationDpEvent

        gaussian = dpe.GaussianDpEvent(self.noise_multiplier)
        epochs = -(-rounds // self.rounds_per_epoch)
        return dpe.SelfComposedDpEvent(
            RandomAllocationDpEvent(self.rounds_per_epoch, gaussian), epochs
        )

    @override
    def scaled_sampling(self, population: float, compute: float) -> dict[str, float]:
        epoch = times(self.rounds_per_epoch, population / compute)
        return {
            "rounds_per_epoch": epoch,
            "rounds": epoch * max(1, round(self.rounds / epoch)),
            "units_per_round": times(self.units_per_round, compute),
        }
