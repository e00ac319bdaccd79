"""Who takes part in a round: drawn from secret coins, the same for every data set.

Every sampler looks at public constants and coins first and at the users last, so that adding or
removing one user changes what one virtual client holds, and nothing else (dp.md 2.1).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol, cast

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from typing_extensions import override

from fedemb.errors import PlanMismatch
from fedemb.keys import derive
from fedemb.privacy.mechanisms.mechanism import MechanismPlan
from fedemb.privacy.mechanisms.noise import Words, coins, heads

Rows = npt.NDArray[np.int64]


class Index(Protocol):
    """What a sampler needs of `client_data.GroupIndex`."""

    @property
    def virtual_clients(self) -> int:
        """Virtual clients per grouping."""
        ...

    @property
    def groupings(self) -> int:
        """Independent groupings."""
        ...

    @property
    def user_count(self) -> int:
        """Users in the store."""
        ...

    @property
    def user_keys(self) -> Words:
        """Keyed hash of each user, `[users]`, in row order."""
        ...

    def members(self, grouping: int, group: int) -> Rows:
        """Rows of a virtual client's users, `[members]`."""
        ...


@dataclass(frozen=True)
class VirtualClient:
    """One sampled virtual client; it may hold nobody, and then contributes zero."""

    grouping: int
    group: int
    users: Rows
    """Row numbers in the user store, `[members]`, ascending."""


class Sampler(ABC):
    """Draws the virtual clients of a round."""

    def __init__(self, plan: MechanismPlan, coin_key: bytes):
        self.plan = plan
        self._coin_key = coin_key

    @abstractmethod
    def sample(self, round_index: int, index: Index) -> list[VirtualClient]:
        """Returns the virtual clients of a round: a function of coins, round and index alone.

        Raises:
          PlanMismatch: the index was built for another partition, or the round is not planned.
        """

    def _round_key(self, round_index: int) -> bytes:
        return derive(self._coin_key, "round", str(round_index))

    def _check(self, round_index: int, index: Index) -> None:
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
                    "with the configuration the plan was made from"
                )


class GroupPoissonSampler(Sampler):
    """Each virtual client takes part with probability q, whoever is in it.

    Coins are tossed for all virtual clients, empty ones included: coin g of round r depends on the
    key, r and g only.
    """

    @override
    def sample(self, round_index: int, index: Index) -> list[VirtualClient]:
        self._check(round_index, index)
        grouping = round_index % self.plan.groupings
        words = coins(self._round_key(round_index), self.plan.virtual_clients)
        probability = cast("float", self.plan.sampling_probability)
        sampled = np.flatnonzero(heads(words, probability))
        return [
            VirtualClient(grouping, group, np.sort(index.members(grouping, group)))
            for group in map(int, sampled)
        ]


class UserPoissonSampler(Sampler):
    """Each user takes part with probability q, then falls into one of K groups.

    Coin and group of a user depend on the key, the round and the user's own keyed hash only.
    """

    @override
    def sample(self, round_index: int, index: Index) -> list[VirtualClient]:
        self._check(round_index, index)
        coin, place = _user_words(self._round_key(round_index), index.user_keys)
        probability = cast("float", self.plan.sampling_probability)
        rows = np.flatnonzero(heads(coin, probability))
        groups = (place[rows] % np.uint64(self._clients)).astype(np.int64)
        return [
            VirtualClient(0, group, rows[groups == group].astype(np.int64))
            for group in range(self._clients)
        ]

    @property
    def _clients(self) -> int:
        return cast("int", self.plan.clients_per_round)


class FixedSizeSampler(Sampler):
    """The paper's sampler: K * M users without replacement, cut into K groups of M.

    Drawn are slots, at least `users_lower_bound` of them; a slot without a user stays empty. So the
    chance of a user never exceeds the planned one, however few users there are.
    """

    @override
    def sample(self, round_index: int, index: Index) -> list[VirtualClient]:
        self._check(round_index, index)
        clients = cast("int", self.plan.clients_per_round)
        size = cast("int", self.plan.users_per_client)
        slots = max(index.user_count, cast("int", self.plan.users_lower_bound))
        words = coins(self._round_key(round_index), slots)
        drawn = np.argpartition(words, clients * size - 1)[: clients * size]
        drawn = drawn[np.argsort(words[drawn])].reshape(clients, size)
        return [
            VirtualClient(0, group, np.sort(members[members < index.user_count]).astype(np.int64))
            for group, members in enumerate(drawn)
        ]


class CyclicSampler(Sampler):
    """All virtual clients in turn, in a keyed order: every separation is as large as can be.

    A participation log is kept and enforced all the same; it is a function of the key and the round
    and is rebuilt, not stored.
    """

    def __init__(self, plan: MechanismPlan, coin_key: bytes):
        super().__init__(plan, coin_key)
        self._order = np.argsort(coins(derive(coin_key, "order"), plan.virtual_clients))
        self._log = ParticipationLog(plan)

    @override
    def sample(self, round_index: int, index: Index) -> list[VirtualClient]:
        self._check(round_index, index)
        if self._log.next_round > round_index:
            self._log = ParticipationLog(self.plan)
        for earlier in range(self._log.next_round, round_index + 1):
            self._log.record(earlier, self._scheduled(earlier))
        return [
            VirtualClient(0, group, np.sort(index.members(0, group)))
            for group in map(int, self._scheduled(round_index))
        ]

    def _scheduled(self, round_index: int) -> Rows:
        clients = cast("int", self.plan.clients_per_round)
        turn = np.arange(round_index * clients, (round_index + 1) * clients)
        return np.sort(self._order[turn % self.plan.virtual_clients]).astype(np.int64)


class ParticipationLog:
    """Refuses a round in which a virtual client would take part too often or too soon."""

    def __init__(self, plan: MechanismPlan):
        self._separation = cast("int", plan.min_separation)
        self._most = cast("int", plan.max_participations)
        self._last = np.full(plan.virtual_clients, -self._separation, dtype=np.int64)
        self._count = np.zeros(plan.virtual_clients, dtype=np.int64)
        self.next_round = 0

    def record(self, round_index: int, groups: Rows) -> None:
        """Notes who takes part in the next round.

        Raises:
          PlanMismatch: the round is not the next one, or a bound of the plan would be broken.
        """
        if round_index != self.next_round:
            raise PlanMismatch(
                f"round {round_index} follows round {self.next_round - 1} in the participation log;"
                " run the rounds in order"
            )
        if len(np.unique(groups)) != len(groups):
            raise PlanMismatch("a virtual client takes part twice in one round; sample anew")
        if np.any(round_index - self._last[groups] < self._separation):
            raise PlanMismatch(
                f"a virtual client of round {round_index} took part less than "
                f"{self._separation} rounds before; the schedule is not the planned one"
            )
        if np.any(self._count[groups] >= self._most):
            raise PlanMismatch(
                f"a virtual client of round {round_index} took part {self._most} times already; the"
                " schedule is not the planned one"
            )
        self._last[groups] = round_index
        self._count[groups] += 1
        self.next_round += 1


def build_sampler(plan: MechanismPlan, coin_key: bytes) -> Sampler:
    """Returns the sampler that the plan's event is the price of.

    Args:
      plan: the mechanism.
      coin_key: `noise.run_key(root, "coins", ...)`.
    """
    samplers: dict[str, type[Sampler]] = {
        "group_poisson_gaussian": GroupPoissonSampler,
        "not_private": GroupPoissonSampler,
        "user_poisson": UserPoissonSampler,
        "fixed_size": FixedSizeSampler,
        "tree_aggregation": CyclicSampler,
        "blt": CyclicSampler,
    }
    return samplers[plan.kind](plan, coin_key)


def _user_words(key: bytes, user_keys: Words) -> tuple[Words, Words]:
    """Two words per user, `[users]` each, from AES-256 of the user's hash: a keyed permutation.

    ChaCha20 has no cheap random access by 64-bit name; one block cipher call covers all users.
    """
    blocks = np.zeros((len(user_keys), 2), dtype="<u8")
    blocks[:, 0] = user_keys
    # ECB on distinct blocks is a random function up to the birthday bound of 2^64 users.
    encryptor = Cipher(algorithms.AES256(key), modes.ECB()).encryptor()
    words = np.frombuffer(encryptor.update(blocks.tobytes()), dtype="<u8").reshape(-1, 2)
    return words[:, 0].astype(np.uint64), words[:, 1].astype(np.uint64)
