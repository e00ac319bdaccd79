"""DP-FTRL: noise on the nodes of a binary tree over rounds (Kairouz et al., arXiv 2103.00039).

Virtual clients participate in turn: each in at most `max_participations` rounds, at least
`min_separation` rounds apart. The noise of the run is one Gaussian on a matrix, so only the whole
run has an event.
"""

# dp-accounting ships no types.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from pydantic import NonNegativeInt, PositiveInt
from typing_extensions import override

from fedemb.errors import ConfigError, PlanMismatch
from fedemb.privacy.mechanisms.mechanism import MechanismPlan, times
from fedemb.privacy.mechanisms.section import MechanismConfig, NoisedConfig, PublicNumbers
from fedemb.privacy.mechanisms.tree_sensitivity import sensitivity

if TYPE_CHECKING:
    from dp_accounting import dp_event as dpe

    from fedemb.privacy.randomness.keyed_noise import TreeStream
    from fedemb.privacy.randomness.sampling import Index, Sampler, VirtualClient


class TreeAggregationConfig(NoisedConfig):
    """DP-FTRL: noise on the nodes of a binary tree over rounds; bounded participation."""

    tracks_participation = True

    kind: Literal["tree_aggregation"] = "tree_aggregation"
    clients_per_round: PositiveInt
    """Virtual clients per round; the normalizer."""
    min_separation: PositiveInt
    """Minimum difference between the round numbers of two participations of a virtual client."""
    max_participations: PositiveInt
    """Maximum number of participations of a virtual client in the run."""
    restart_every: NonNegativeInt = 0
    """Rounds per tree; 0: one tree for the run."""

    @override
    def check_run(self, numbers: PublicNumbers) -> None:
        super().check_run(numbers)
        if numbers.groupings > 1:
            raise ValueError(
                f"mechanism.kind={self.kind} tracks participation, so partition.groupings must be "
                f"1, got {numbers.groupings}; set it to 1"
            )
        if self.clients_per_round > numbers.virtual_clients:
            raise ValueError(
                f"mechanism.clients_per_round={self.clients_per_round} exceeds "
                f"partition.virtual_clients={numbers.virtual_clients}; lower it"
            )


class TreeAggregation(TreeAggregationConfig, MechanismPlan):
    """Tree noise: the noise of the first t rounds is that of the nodes that cover them.

    A participation changes an update by up to 2C.
    """

    section = TreeAggregationConfig
    proof = "the sensitivity of the noise's matrix under bounded participation, at 2C"

    matrix_sensitivity: float | None = None
    """L2 sensitivity of the correlated noise to the updates of one user, per unit of change."""

    @override
    @classmethod
    def derived(cls, section: MechanismConfig, numbers: PublicNumbers) -> dict[str, object]:
        assert isinstance(section, TreeAggregationConfig)
        value = sensitivity(
            section.rounds,
            section.min_separation,
            section.max_participations,
            section.restart_every,
        )
        return {"matrix_sensitivity": value}

    @override
    def check(self) -> None:
        super().check()
        clients, groups = self.clients_per_round, self.virtual_clients
        if self.groupings != 1:
            raise ConfigError(
                f"{self.kind} limits the rounds of a virtual client, so groupings must be 1, got "
                f"{self.groupings}; set it to 1"
            )
        if clients * self.min_separation > groups:
            raise ConfigError(
                f"{clients} clients per round and min_separation={self.min_separation} need at "
                f"least {clients * self.min_separation} virtual clients, got {groups}; lower either"
            )
        if clients * self.rounds > self.max_participations * groups:
            raise ConfigError(
                f"{self.rounds} rounds of {clients} clients need "
                f"{math.ceil(clients * self.rounds / groups)} participations of some virtual "
                f"client, got max_participations={self.max_participations}; raise it or lower "
                "rounds"
            )
        ours = self._sensitivity_over(self.rounds)
        if self.matrix_sensitivity is None or not math.isclose(
            ours, self.matrix_sensitivity, rel_tol=1e-9
        ):
            raise PlanMismatch(
                f"matrix_sensitivity={self.matrix_sensitivity} of the plan differs from the "
                f"recomputed {ours:.12g}; plan the run again"
            )

    @property
    @override
    def normalizer(self) -> float:
        return float(self.clients_per_round)

    @override
    def sampler(self, coin_key: bytes) -> Sampler:
        from fedemb.privacy.randomness.sampling import RoundRobinSampler

        return RoundRobinSampler(self, coin_key)

    @override
    def sample(self, round_key: bytes, round_index: int, index: Index) -> list[VirtualClient]:
        raise NotImplementedError("all rounds share one order; call `sampler`")

    @override
    def noise_stream(self, size: int) -> TreeStream:
        from fedemb.privacy.randomness.keyed_noise import TreeStream, grid_scale

        return TreeStream(self.restart_every or self.rounds, grid_scale(self), size)

    @property
    @override
    def round_event(self) -> dpe.DpEvent:
        from dp_accounting import dp_event as dpe

        return dpe.UnsupportedDpEvent()

    @override
    def event_of(self, rounds: int) -> dpe.DpEvent:
        from dp_accounting import dp_event as dpe

        return dpe.GaussianDpEvent(self.noise_multiplier / (2 * self._sensitivity_over(rounds)))

    @override
    def scaled_sampling(self, population: float, compute: float) -> dict[str, float]:
        clients = times(self.clients_per_round, compute)
        if population == compute:
            return {"clients_per_round": clients}
        groups = times(self.virtual_clients, population)
        separation, most = even_round_robin(groups, clients, self.rounds)
        return {
            "clients_per_round": clients,
            "min_separation": separation,
            "max_participations": most,
            "matrix_sensitivity": sensitivity(self.rounds, separation, most, self.restart_every),
        }

    def _sensitivity_over(self, rounds: int) -> float:
        """Returns the matrix sensitivity of the first `rounds` rounds."""
        return sensitivity(rounds, self.min_separation, self.max_participations, self.restart_every)

    @override
    def matrix(self) -> dict[str, float | None] | None:
        return {
            "sensitivity": self.matrix_sensitivity,
            "min_separation": self.min_separation,
            "max_participations": self.max_participations,
            "restart_every": self.restart_every,
        }


def even_round_robin(virtual_clients: int, clients: int, rounds: int) -> tuple[int, int]:
    """Returns separation and number of participations of round-robin sampling."""
    separation = max(1, virtual_clients // clients)
    return separation, math.ceil(rounds * clients / virtual_clients)
