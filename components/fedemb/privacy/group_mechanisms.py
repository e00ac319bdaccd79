"""Mechanisms of whole virtual clients: Poisson sampling, tree aggregation, and the baseline."""

# The numeric libraries are not fully typed; the project's own signatures are checked.
# pyright: reportMissingTypeStubs=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt
from pydantic import NonNegativeInt, PositiveInt
from typing_extensions import override

from fedemb.errors import ConfigError, PlanMismatch
from fedemb.foundation.section import Probability
from fedemb.privacy.mechanism import MechanismPlan, times
from fedemb.privacy.section import (
    MAX_SUM_BITS,
    MOST_GRID_BITS,
    MechanismConfig,
    NoisedConfig,
    PublicNumbers,
)

if TYPE_CHECKING:
    from dp_accounting import dp_event as dpe

    from fedemb.privacy.noise import TreeStream
    from fedemb.privacy.sampling import Index, Sampler, VirtualClient


class GroupPoissonGaussianConfig(NoisedConfig):
    """Default: whole virtual clients are sampled independently, docs/privacy/theorem.md."""

    kind: Literal["group_poisson_gaussian"] = "group_poisson_gaussian"
    sampling_probability: Probability
    """Sampling probability (q) of each virtual client in each round."""


class GroupPoissonGaussian(GroupPoissonGaussianConfig, MechanismPlan):
    """Samples each virtual client with probability q, regardless of its users; sensitivity C."""

    section = GroupPoissonGaussianConfig
    relation_name = "REPLACE_ONE"
    proof = "the theorem on sampling whole virtual clients"

    @property
    @override
    def normalizer(self) -> float:
        return self.sampling_probability * self.virtual_clients

    @override
    def sample(self, round_key: bytes, round_index: int, index: Index) -> list[VirtualClient]:
        from fedemb.privacy.sampling import sample_groups

        return sample_groups(self, self.sampling_probability, round_key, round_index, index)

    @property
    @override
    def round_event(self) -> dpe.DpEvent:
        from dp_accounting import dp_event as dpe

        return dpe.PoissonSampledDpEvent(
            self.sampling_probability, dpe.GaussianDpEvent(self.noise_multiplier)
        )

    @override
    def conservative_event(self) -> dpe.DpEvent:
        from dp_accounting import dp_event as dpe

        gaussian = dpe.GaussianDpEvent(self.noise_multiplier / 2)
        sampled = dpe.PoissonSampledDpEvent(self.sampling_probability, gaussian)
        return dpe.SelfComposedDpEvent(sampled, self.rounds)


# Baseline without noise; reports and gate treat it as not private.


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
        from fedemb.privacy.sampling import sample_groups

        return sample_groups(self, self.sampling_probability, round_key, round_index, index)

    @property
    @override
    def round_event(self) -> dpe.DpEvent:
        from dp_accounting import dp_event as dpe

        return dpe.NonPrivateDpEvent()

    @override
    def event_of(self, rounds: int) -> dpe.DpEvent:
        return self.round_event


# Sensitivity of tree aggregation under bounded participation, in our own numpy.
#
# A user whose virtual client takes part in rounds t_1 < t_2 < ... (at least `min_separation`
# apart, at most `max_participations` of them) is under c_v of the leaves of node v. If every
# participation moves the sum by one unit in the worst direction, node v moves by c_v, and the
# squared sensitivity is the maximum of sum_v c_v^2 over all patterns. Nodes are the complete
# dyadic ones, as in tensorflow-privacy's aggregator (Kairouz et al., arXiv 2103.00039, appendix
# D).


Floats = npt.NDArray[np.float64]

_IMPOSSIBLE = -math.inf


@functools.lru_cache(maxsize=1024)
def sensitivity(
    rounds: int, min_separation: int, max_participations: int, restart_every: int = 0
) -> float:
    """Returns the L2 sensitivity of the tree's nodes per unit of change.

    Between trees the separation is not used, which can only make the result larger.

    The poster's run (docs/explanation/method.md#published-figures):

    >>> round(sensitivity(800, 77, 11) ** 2)
    177

    Args:
      rounds: leaves in all.
      min_separation: least difference between the round numbers of two participations.
      max_participations: most participations in the run.
      restart_every: leaves per tree; 0 for a single one.
    """
    if restart_every <= 0 or restart_every >= rounds:
        sizes = [rounds]
    else:
        sizes = [restart_every] * (rounds // restart_every)
        sizes += [rounds % restart_every] if rounds % restart_every else []
    if min(max_participations, math.ceil(rounds / min_separation)) == 1:
        return math.sqrt(sizes[0].bit_length())  # One leaf, and all nodes above it.
    most = min(max_participations, math.ceil(rounds / min_separation) + len(sizes))
    best = np.zeros(most + 1)
    for size in sizes:
        values = _tree_values(size, min_separation, most)
        best = np.array(
            [max(best[k - j] + values[j] for j in range(k + 1)) for k in range(most + 1)]
        )
    return math.sqrt(float(best.max()))


def _tree_values(leaves: int, gap: int, most: int) -> list[float]:
    """Largest squared sensitivity of one tree with exactly k participations, for k = 0..most."""
    return [
        float(table[0, gap]) if table is not None else _IMPOSSIBLE
        for table in (_block(leaves, gap, k) for k in range(most + 1))
    ]


@functools.lru_cache(maxsize=65536)
def _block(leaves: int, gap: int, ones: int) -> Floats | None:
    """Best value of a block by (lead, tail), `[gap + 1, gap + 1]`, or None if nothing fits.

    `lead`: the first participation is at this leaf or later. `tail`: the next one outside may come
    this many leaves after the block, and keeps the gap.
    """
    if ones > math.ceil(leaves / gap):
        return None
    if ones == 0:
        return np.zeros((gap + 1, gap + 1))
    full = leaves & (leaves - 1) == 0
    if ones == 1:
        return _single(leaves, gap)
    left_leaves = leaves // 2 if full else 1 << (leaves.bit_length() - 1)
    right_leaves = leaves - left_leaves
    out = np.full((gap + 1, gap + 1), _IMPOSSIBLE)
    steps = np.arange(gap + 1)
    for right_ones in range(ones + 1):
        left = _block(left_leaves, gap, ones - right_ones)
        right = _block(right_leaves, gap, right_ones)
        if left is None or right is None:
            continue
        if right_ones == 0:
            joined = left[:, np.minimum(gap, steps + right_leaves)]
        elif right_ones == ones:
            joined = right[np.maximum(0, steps - left_leaves), :]
        else:
            # The right part starts no earlier than leaf j, which the left part has to respect.
            joined = np.stack([(left[lead][:, None] + right).max(axis=0) for lead in steps])
        out = np.maximum(out, joined)
    return out + (ones * ones if full else 0)


@functools.lru_cache(maxsize=4096)
def _single(leaves: int, gap: int) -> Floats:
    """`_block` for one participation: the deepest leaf within the allowed range."""
    depth = np.empty(leaves)
    start, left = 0, leaves
    while left:
        size = 1 << (left.bit_length() - 1)
        depth[start : start + size] = size.bit_length()  # Nodes above a leaf of a full block.
        start, left = start + size, left - size
    out = np.full((gap + 1, gap + 1), _IMPOSSIBLE)
    for lead in range(min(gap + 1, leaves)):
        # Depth falls from left to right, so the first allowed leaf is the best.
        out[lead, np.arange(gap + 1) + leaves - gap >= lead] = depth[lead]
    return out


# DP-FTRL: noise on the nodes of a binary tree over rounds (Kairouz et al., arXiv 2103.00039).
#
# Virtual clients participate in turn: each in at most `max_participations` rounds, at least
# `min_separation` rounds apart. The noise of the run is one Gaussian on a matrix, so only the
# whole run has an event.


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
        from fedemb.privacy.sampling import RoundRobinSampler

        return RoundRobinSampler(self, coin_key)

    @override
    def sample(self, round_key: bytes, round_index: int, index: Index) -> list[VirtualClient]:
        raise NotImplementedError("all rounds share one order; call `sampler`")

    @override
    def noise_stream(self, size: int) -> TreeStream:
        from fedemb.privacy.noise import TreeStream, grid_scale

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


def even_round_robin(virtual_clients: int, clients: int, rounds: int) -> tuple[int, int]:
    """Returns separation and number of participations of round-robin sampling."""
    separation = max(1, virtual_clients // clients)
    return separation, math.ceil(rounds * clients / virtual_clients)
