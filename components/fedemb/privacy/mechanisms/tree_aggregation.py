"""DP-FTRL: noise on the nodes of a binary tree over rounds (Kairouz et al., arXiv 2103.00039)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import NonNegativeInt
from typing_extensions import override

from fedemb.privacy.mechanisms.mechanism import Cohort, PublicNumbers
from fedemb.privacy.mechanisms.round_robin import RoundRobinConfig, RoundRobinPlan
from fedemb.privacy.mechanisms.section import MechanismConfig

if TYPE_CHECKING:
    from fedemb.privacy.randomness.keyed_noise import CorrelatedStream


class TreeAggregationConfig(RoundRobinConfig):
    """DP-FTRL: noise on the nodes of a binary tree over rounds; bounded participation."""

    kind: Literal["tree_aggregation"] = "tree_aggregation"
    restart_every: NonNegativeInt = 0
    """Rounds per tree; 0: one tree for the run."""


class TreeAggregation(TreeAggregationConfig, RoundRobinPlan):
    """Tree noise: the noise of the first t rounds is that of the nodes that cover them."""

    section = TreeAggregationConfig

    @override
    @classmethod
    def derived(cls, section: MechanismConfig, numbers: PublicNumbers) -> dict[str, object]:
        assert isinstance(section, TreeAggregationConfig)
        from fedemb.privacy.mechanisms.tree_sensitivity import sensitivity

        value = sensitivity(
            section.rounds,
            section.min_separation,
            section.max_participations,
            section.restart_every,
        )
        return {"matrix_sensitivity": value}

    @override
    @classmethod
    def section_at(cls, cohort: Cohort, **options: int | None) -> dict[str, float]:
        return {
            **super().section_at(cohort, **options),
            "restart_every": options.get("restart_every") or 0,
        }

    @override
    def noise_stream(self, size: int) -> CorrelatedStream:
        from fedemb.privacy.randomness.keyed_noise import TreeStream, grid_scale

        return TreeStream(self.restart_every or self.rounds, grid_scale(self), size)

    @override
    def sensitivity_over(self, rounds: int) -> float:
        from fedemb.privacy.mechanisms.tree_sensitivity import sensitivity

        return sensitivity(rounds, self.min_separation, self.max_participations, self.restart_every)

    @override
    def sensitivity(self, min_separation: int, max_participations: int) -> float:
        from fedemb.privacy.mechanisms.tree_sensitivity import sensitivity

        return sensitivity(self.rounds, min_separation, max_participations, self.restart_every)

    @override
    def prefix_variance(self) -> float:
        leaves = self.restart_every or self.rounds
        nodes = [
            (round_ // leaves) * leaves.bit_count() + (round_ % leaves + 1).bit_count()
            for round_ in range(self.rounds)
        ]
        return sum(nodes) / len(nodes)

    @override
    def matrix(self) -> dict[str, float | None] | None:
        return {**(super().matrix() or {}), "restart_every": self.restart_every}
