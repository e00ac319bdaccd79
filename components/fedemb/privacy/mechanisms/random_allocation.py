"""Random allocation: every unit in exactly one round of each epoch, which one is secret.

Balls and bins (Chua et al., arXiv 2412.16802), priced exactly (Feldman and Shenfeld, ICML 2026,
arXiv 2602.17284). As even as shuffled epochs, and with a price that holds for what runs.
"""

# dp-accounting ships no types.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import PositiveInt
from typing_extensions import override

from fedemb.errors import ConfigError
from fedemb.privacy.mechanisms.mechanism import Cohort, times
from fedemb.privacy.mechanisms.per_unit_sampling import PerUnitSampling, UnitsAloneConfig

if TYPE_CHECKING:
    from dp_accounting import dp_event as dpe

    from fedemb.privacy.randomness.sampling import Index, Sampler, VirtualClient


class RandomAllocationConfig(UnitsAloneConfig):
    """DP-SGD in epochs: each unit alone, in exactly one round of each; sensitivity C."""

    kind: Literal["random_allocation"] = "random_allocation"
    rounds_per_epoch: PositiveInt
    """Rounds (t) of which each unit takes part in exactly one; they divide `rounds`."""


class RandomAllocation(RandomAllocationConfig, PerUnitSampling):
    """Each unit takes part in one round of each epoch, alone, with one vector of norm at most C.

    Which round is drawn for each unit alone, so no unit moves another. The sums of an epoch are a
    mixture over its rounds of N(c) in one of them and N(0) in the others, against N(0) in all,
    |c| <= C. Each of them is post-processing of a one-dimensional sum that moves by exactly C, so
    the whole epoch is, also where a round looks at the outputs of earlier ones.
    """

    section = RandomAllocationConfig
    proof = "a unit adds one vector of norm at most C in one secret round of each epoch"

    @override
    @classmethod
    def section_at(cls, cohort: Cohort, **options: Any) -> dict[str, Any]:
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
                f"{self.rounds} rounds are no whole number of epochs of {self.rounds_per_epoch}, "
                "and a part of an epoch costs as much as all of it; set mechanism.rounds to a "
                "multiple of mechanism.rounds_per_epoch"
            )

    @override
    def sampler(self, coin_key: bytes) -> Sampler:
        from fedemb.privacy.randomness.sampling import AllocationSampler

        return AllocationSampler(self, coin_key, self.rounds_per_epoch)

    @override
    def sample(self, round_key: bytes, round_index: int, index: Index) -> list[VirtualClient]:
        raise NotImplementedError("the rounds of an epoch have one key, which `sampler` holds")

    @property
    @override
    def round_event(self) -> dpe.DpEvent:
        from dp_accounting import dp_event as dpe

        return dpe.UnsupportedDpEvent()

    @override
    def event_of(self, rounds: int) -> dpe.DpEvent:
        from dp_accounting import dp_event as dpe

        from fedemb.privacy.accounting.allocation import RandomAllocationDpEvent

        gaussian = dpe.GaussianDpEvent(self.noise_multiplier)
        epochs = -(-rounds // self.rounds_per_epoch)
        return dpe.SelfComposedDpEvent(
            RandomAllocationDpEvent(self.rounds_per_epoch, gaussian), epochs
        )

    @override
    def scaled_sampling(self, population: float, compute: float) -> dict[str, Any]:
        epoch = times(self.rounds_per_epoch, population / compute)
        return {
            "rounds_per_epoch": epoch,
            "rounds": epoch * max(1, round(self.rounds / epoch)),
            "units_per_round": times(self.units_per_round, compute),
        }
