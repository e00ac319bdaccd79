"""Samples the participants of a round from secret coins, independently of the data set.

Every sampler uses public constants and coins first and the users last, so that adding or removing
one user changes only the content of one virtual client
(docs/privacy/sensitivity.md#what-one-user-can-change).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from jaxtyping import UInt64
from typing_extensions import override

from fedemb.errors import PlanMismatch
from fedemb.keys import derive
from fedemb.privacy.noise import Words, coins, heads
from fedemb.privacy.section import MOST_UNITS

Rows = npt.NDArray[np.int64]


class Index(Protocol):
    """Interface that a sampler requires of `client_data.GroupIndex`."""

    @property
    def virtual_clients(self) -> int:
        """Number of virtual clients per grouping."""
        ...

    @property
    def groupings(self) -> int:
        """Number of independent groupings."""
        ...

    @property
    def user_count(self) -> int:
        """Number of users in the store."""
        ...

    @property
    def user_keys(self) -> Words:
        """Keyed hash of each user, `[users]`, in row order."""
        ...

    def members(self, grouping: int, group: int) -> Rows:
        """Returns the rows of a virtual client's users, `[members]`."""
        ...


@dataclass(frozen=True)
class VirtualClient:
    """One contribution: a sampled virtual client, or a unit that is sampled individually.

    A virtual client may be empty, and then contributes zero.
    """

    grouping: int
    """Number of the grouping; for an individually sampled image, its index among its owner's
    images."""
    group: int
    """Number of the virtual client, or the keyed hash of the unit; never its index in a list."""
    users: Rows
    """Row numbers in the user store, `[members]`, ascending."""


class SampledPlan(Protocol):
    """Parameters and rule that a sampler reads from the plan of a mechanism."""

    @property
    def rounds(self) -> int:
        """Number of planned rounds."""
        ...

    @property
    def virtual_clients(self) -> int:
        """Number of virtual clients per grouping."""
        ...

    @property
    def groupings(self) -> int:
        """Number of independent groupings."""
        ...

    def sample(self, round_key: bytes, round_index: int, index: Index) -> list[VirtualClient]:
        """Returns the virtual clients of a round."""
        ...


class BoundedParticipation(SampledPlan, Protocol):
    """Plan that bounds the number and the spacing of a virtual client's participations."""

    @property
    def clients_per_round(self) -> int:
        """Number of virtual clients per round."""
        ...

    @property
    def min_separation(self) -> int:
        """Minimum difference of two rounds of one virtual client."""
        ...

    @property
    def max_participations(self) -> int:
        """Maximum number of rounds of one virtual client."""
        ...


class Sampler:
    """Draws the virtual clients of a round: a function of only coins, round and index."""

    def __init__(self, plan: SampledPlan, coin_key: bytes):
        self.plan = plan
        self._coin_key = coin_key

    def sample(self, round_index: int, index: Index) -> list[VirtualClient]:
        """Returns the participants of a round.

        Raises:
          PlanMismatch: the index was built for another partition, or the round is not planned.
        """
        plan = self.plan
        if not 0 <= round_index < plan.rounds:
            raise PlanMismatch(
                f"round {round_index} is not one of the {plan.rounds} planned rounds; plan and "
                "reserve a longer run"
            )
        for name in ("virtual_clients", "groupings"):
            planned, found = getattr(plan, name), getattr(index, name)
            if planned != found:
                raise PlanMismatch(
                    f"the partition has {name}={found}, the plan {planned}; partition the users "
                    "with the configuration of the plan"
                )
        return self.draw(round_index, index)

    def draw(self, round_index: int, index: Index) -> list[VirtualClient]:
        """Draws by the mechanism's rule, with a key for this round only."""
        key = derive(self._coin_key, "round", str(round_index))
        return self.plan.sample(key, round_index, index)


def sample_groups(
    plan: SampledPlan, probability: float, round_key: bytes, round_index: int, index: Index
) -> list[VirtualClient]:
    """Samples each virtual client with probability q, regardless of its members.

    Coins are drawn for all virtual clients, including empty ones: coin g of round r depends only on
    the key, r and g.
    """
    grouping = round_index % plan.groupings
    words = coins(round_key, plan.virtual_clients)
    sampled = np.flatnonzero(heads(words, probability))
    return [
        VirtualClient(grouping, group, np.sort(index.members(grouping, group)))
        for group in map(int, sampled)
    ]


def sample_units(probability: float, round_key: bytes, index: Index) -> list[VirtualClient]:
    """Samples each unit individually with probability q.

    A unit's coin depends only on the key, the round and the unit's own keyed hash, so that adding
    or removing other units does not change it.

    Raises:
      PlanMismatch: more units than the capacity of one sum.
    """
    words, _ = user_words(round_key, index.user_keys)
    return single_units(np.flatnonzero(heads(words, probability)), index)


def sample_images(
    most: int, probability: float, round_key: bytes, index: Index
) -> list[VirtualClient]:
    """Samples each image individually with probability q; a user has at most `most` images.

    The coin of an image depends only on the key, the round, its owner's keyed hash and its index
    among its owner's images. Coins are also drawn for indices without an image.

    Raises:
      PlanMismatch: more images than the capacity of one sum.
    """
    keys = index.user_keys
    if len(keys) * most > MOST_UNITS:
        raise PlanMismatch(
            f"more than {MOST_UNITS} images, {most} of each user, could overflow 64-bit sums; "
            "lower partition.max_images_per_user"
        )
    found: list[VirtualClient] = []
    for place in range(most):
        words, _ = user_words(derive(round_key, "image", str(place)), keys)
        rows = np.flatnonzero(heads(words, probability)).astype(np.int64)
        found += [
            VirtualClient(place, int(keys[row]), rows[i : i + 1]) for i, row in enumerate(rows)
        ]
    return found


def single_units(rows: Rows, index: Index) -> list[VirtualClient]:
    """Returns the units of some rows, each separate and identified by its keyed hash.

    Raises:
      PlanMismatch: more units than the capacity of one sum.
    """
    keys = index.user_keys
    if len(keys) > MOST_UNITS:
        raise PlanMismatch(
            f"more than {MOST_UNITS} units could overflow 64-bit sums; train on fewer of them"
        )
    rows = rows.astype(np.int64)
    return [VirtualClient(0, int(keys[row]), rows[i : i + 1]) for i, row in enumerate(rows)]


class RoundRobinSampler(Sampler):
    """Samples all virtual clients in turn, in a keyed order, with maximum separation.

    A participation log is also kept and enforced. It is a function of the key and the round, and is
    rebuilt instead of stored.
    """

    def __init__(self, plan: BoundedParticipation, coin_key: bytes):
        super().__init__(plan, coin_key)
        self._turns = plan
        self._order = np.argsort(coins(derive(coin_key, "order"), plan.virtual_clients))
        self._log = ParticipationLog(plan)

    @override
    def draw(self, round_index: int, index: Index) -> list[VirtualClient]:
        if self._log.next_round > round_index:
            self._log = ParticipationLog(self._turns)
        for earlier in range(self._log.next_round, round_index + 1):
            self._log.record(earlier, self._scheduled(earlier))
        return [
            VirtualClient(0, group, np.sort(index.members(0, group)))
            for group in map(int, self._scheduled(round_index))
        ]

    def _scheduled(self, round_index: int) -> Rows:
        clients = self._turns.clients_per_round
        turn = np.arange(round_index * clients, (round_index + 1) * clients)
        return np.sort(self._order[turn % self.plan.virtual_clients]).astype(np.int64)


class ParticipationLog:
    """Rejects a round in which a virtual client would participate too often or too soon."""

    def __init__(self, plan: BoundedParticipation):
        self._separation, self._most = plan.min_separation, plan.max_participations
        self._last = np.full(plan.virtual_clients, -self._separation, dtype=np.int64)
        self._count = np.zeros(plan.virtual_clients, dtype=np.int64)
        self.next_round = 0

    def record(self, round_index: int, groups: Rows) -> None:
        """Records the participants of the next round.

        Raises:
          PlanMismatch: the round is not the next one, or a bound of the plan would be exceeded.
        """
        if round_index != self.next_round:
            raise PlanMismatch(
                f"round {round_index} follows round {self.next_round - 1} in the participation log;"
                " run the rounds in order"
            )
        if len(np.unique(groups)) != len(groups):
            raise PlanMismatch("a virtual client was sampled twice in one round; report this bug")
        if np.any(round_index - self._last[groups] < self._separation):
            raise PlanMismatch(
                f"a virtual client of round {round_index} participated less than "
                f"{self._separation} rounds before, against the plan; start a new run"
            )
        if np.any(self._count[groups] >= self._most):
            raise PlanMismatch(
                f"a virtual client of round {round_index} already participated {self._most} times, "
                "the most that the plan allows; start a new run"
            )
        self._last[groups] = round_index
        self._count[groups] += 1
        self.next_round += 1


def user_words(
    key: bytes, user_keys: UInt64[np.ndarray, " users"]
) -> tuple[UInt64[np.ndarray, " users"], UInt64[np.ndarray, " users"]]:
    """Returns two words per user, `[users]` each: AES-256 of the hash, a keyed permutation.

    ChaCha20 has no cheap random access by 64-bit name; one block cipher call covers all users.
    """
    blocks = np.zeros((len(user_keys), 2), dtype="<u8")
    blocks[:, 0] = user_keys
    # ECB on distinct blocks is a random function up to the birthday bound of 2^64 users.
    encryptor = Cipher(algorithms.AES256(key), modes.ECB()).encryptor()
    words = np.frombuffer(encryptor.update(blocks.tobytes()), dtype="<u8").reshape(-1, 2)
    return words[:, 0].astype(np.uint64), words[:, 1].astype(np.uint64)
