"""Mechanisms of whole virtual clients: Poisson sampling and tree aggregation."""

# The numeric libraries are not fully typed; the project's own signatures are checked.
# pyright: reportMissingTypeStubs=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field, NonNegativeInt, PositiveInt, field_validator
from typing_extensions import override

from fedemb.errors import ConfigError
from fedemb.foundation.section import Probability
from fedemb.privacy.mechanism import MechanismPlan
from fedemb.privacy.section import LEAST_NOISE, MOST_NOISE, MechanismConfig, PublicNumbers

if TYPE_CHECKING:
    from dp_accounting import dp_event as dpe


class GroupPoissonGaussianConfig(MechanismConfig):
    """Default: whole virtual clients are sampled independently, docs/privacy/theorem.md."""

    kind: Literal["group_poisson_gaussian"] = "group_poisson_gaussian"
    noise_multiplier: Annotated[float, Field(ge=0, le=MOST_NOISE)]
    """Standard deviation of the noise on the SUM of updates / l2_norm_clip (sigma). 0: a baseline
    without privacy, which the gate always denies."""
    sampling_probability: Probability
    """Sampling probability (q) of each virtual client in each round."""

    @field_validator("noise_multiplier")
    @classmethod
    def _none_or_enough(cls, value: float) -> float:
        if 0 < value < LEAST_NOISE:
            raise ValueError(
                f"noise_multiplier={value:g} is too small; set 0 or at least {LEAST_NOISE:g}"
            )
        return value


class GroupPoissonGaussian(GroupPoissonGaussianConfig, MechanismPlan):
    """Samples each virtual client with probability q, regardless of its users; sensitivity C."""

    section = GroupPoissonGaussianConfig
    relation_name = "REPLACE_ONE"
    proof = "the theorem on sampling whole virtual clients"

    @property
    @override
    def normalizer(self) -> float:
        return self.sampling_probability * self.virtual_clients

    @property
    @override
    def round_event(self) -> dpe.DpEvent:
        return self._at(self.noise_multiplier)

    @override
    def conservative_event(self) -> dpe.DpEvent:
        from dp_accounting import dp_event as dpe

        return dpe.SelfComposedDpEvent(self._at(self.noise_multiplier / 2), self.rounds)

    def _at(self, noise: float) -> dpe.DpEvent:
        from dp_accounting import dp_event as dpe

        if not self.private:
            return dpe.NonPrivateDpEvent()
        return dpe.PoissonSampledDpEvent(self.sampling_probability, dpe.GaussianDpEvent(noise))


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
            # The right part starts no earlier than leaf j, which the left part has to respect. A
            # later j never helps the right part, so only those are best where the left part gains.
            joined = np.empty_like(out)
            for lead, row in enumerate(left):
                gains = np.append(0, np.flatnonzero(row[1:] > row[:-1]) + 1)
                joined[lead] = (row[gains, None] + right[gains]).max(axis=0)
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


class TreeAggregationConfig(MechanismConfig):
    """DP-FTRL: noise on the nodes of a binary tree over rounds; bounded participation."""

    tracks_participation = True

    kind: Literal["tree_aggregation"] = "tree_aggregation"
    clients_per_round: PositiveInt
    """Virtual clients per round, in turn; the normalizer."""
    restart_every: NonNegativeInt = 0
    """Rounds per tree; 0: one tree for the run."""

    @override
    def check_run(self, numbers: PublicNumbers) -> None:
        super().check_run(numbers)
        _check_clients(self, numbers.virtual_clients, numbers.groupings)


def _check_clients(section: TreeAggregationConfig, virtual_clients: int, groupings: int) -> None:
    if groupings > 1:
        raise ConfigError(
            f"mechanism.kind={section.kind} limits the rounds of a virtual client, so "
            f"partition.groupings must be 1, got {groupings}; set it to 1"
        )
    if section.clients_per_round > virtual_clients:
        raise ConfigError(
            f"mechanism.clients_per_round={section.clients_per_round} exceeds "
            f"partition.virtual_clients={virtual_clients}; lower it"
        )


class TreeAggregation(TreeAggregationConfig, MechanismPlan):
    """Tree noise: the noise of the first t rounds is that of the nodes that cover them.

    A participation changes an update by up to 2C.
    """

    section = TreeAggregationConfig
    proof = "the sensitivity of the noise's matrix under bounded participation, at 2C"

    @override
    def check(self) -> None:
        super().check()
        _check_clients(self, self.virtual_clients, self.groupings)

    @property
    @override
    def normalizer(self) -> float:
        return float(self.clients_per_round)

    @property
    def min_separation(self) -> int:
        """Minimum difference between the round numbers of two participations in turn."""
        return self.virtual_clients // self.clients_per_round

    @property
    def max_participations(self) -> int:
        """Maximum number of participations of a virtual client in the run."""
        return math.ceil(self.rounds * self.clients_per_round / self.virtual_clients)

    @property
    @override
    def round_event(self) -> dpe.DpEvent:
        from dp_accounting import dp_event as dpe

        return dpe.UnsupportedDpEvent()

    @override
    def event_of(self, rounds: int) -> dpe.DpEvent:
        from dp_accounting import dp_event as dpe

        return dpe.GaussianDpEvent(self.noise_multiplier / (2 * self.matrix_sensitivity(rounds)))

    def matrix_sensitivity(self, rounds: int) -> float:
        """Returns the L2 sensitivity of the noise of the first rounds to a user's updates."""
        return sensitivity(rounds, self.min_separation, self.max_participations, self.restart_every)
