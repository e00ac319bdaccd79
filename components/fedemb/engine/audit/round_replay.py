"""Repeats a recorded round without one of its users, and checks that the rest is unchanged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import numpy as np

from fedemb.engine.audit.receipts import NoiseReceipts
from fedemb.engine.training_round import TrainingRound
from fedemb.privacy.queries import Mechanism, RoundState
from fedemb.privacy.randomness.noise import round_tag
from fedemb.privacy.randomness.sampling import Index, VirtualClient

Unit = TypeVar("Unit")


class RoundReplay(Generic[Unit]):
    """Repeats one round from its initial weights; the mechanism is rewound to before the round."""

    def __init__(
        self,
        function: TrainingRound[Unit],
        mechanism: Mechanism,
        load: Callable[[VirtualClient], Unit],
        *,
        number: int,
        weights: np.ndarray,
        mean: np.ndarray,
        receipts: NoiseReceipts,
        noise_key: bytes,
    ):
        self._function, self._mechanism, self._load = function, mechanism, load
        self._number, self._weights, self._mean = number, weights, mean
        self._receipts, self._noise_key = receipts, noise_key

    def problems(self, index: Index, after: RoundState) -> set[str]:
        """Returns the codes of failed checks.

        Args:
          index: the users.
          after: mechanism state in the round's record.
        """
        clients = self._mechanism.sample_clients(self._number, index)
        failed, total = self._without_one(index, clients)
        tag = bytes.fromhex(after["tag"])
        if round_tag(self._noise_key, self._number, {"update": total}) != tag:
            failed.add("sum")
        if not self._holds(total, tag):
            failed.add("noise")
        return failed

    def _without_one(
        self, index: Index, clients: list[VirtualClient]
    ) -> tuple[set[str], np.ndarray]:
        """Returns failed checks without one of the users, and the sum with the user added back.

        If images are sampled independently, all images of the user are removed at once, and the
        contribution of each is added back separately, because each is clipped separately.
        """
        members = np.sort(np.concatenate([np.zeros(0, np.int64), *(c.users for c in clients)]))
        if not len(members):
            return set(), self._sum(clients)
        mechanism, failed = self._mechanism, set[str]()
        removed = int(members[len(members) // 2])
        mine = [client for client in clients if removed in client.users]
        wanted = [_less(client, removed) for client in clients]
        apart = _Without(index, removed)
        left = [apart.named(c) for c in mechanism.sample_clients(self._number, apart)]
        apiece = len({client.grouping for client in mine}) == len(mine)
        few = len(mine) <= mechanism.plan.user_contributions
        if not apiece or not few or _names(left) != _names(wanted):
            failed.add("coins")
        total, grid = self._sum(left), 2.0**mechanism.plan.grid_bits
        for one in mine:
            # Other clients are empty but keep their index, which selects the worker.
            there = [client if client is one else _no_client(client) for client in clients]
            gone = [_less(client, removed) for client in there]
            with_them, without = self._sum(there), self._sum(gone)
            for record in (with_them, without):
                if not np.linalg.norm(record.astype(np.float64)) <= grid:
                    failed.add("clip")
            total = total + with_them - without
        return failed, total

    def _holds(self, total: np.ndarray, tag: bytes) -> bool:
        """Returns whether the committed mean is sum plus noise, up to float32 rounding."""
        mechanism = self._mechanism
        plan = mechanism.plan
        output = total / 2.0**plan.grid_bits + self._receipts.drawn(tag, total.size)
        output *= plan.l2_norm_clip / plan.normalizer
        return bool(np.abs(self._mean - output).max() <= 1e-6 * np.abs(output).max())

    def _sum(self, clients: list[VirtualClient]) -> np.ndarray:
        slabs = self._function.slabs(map(self._load, clients), self._number)
        state = self._function.run(self._weights, slabs, self._mechanism.clip).sample_state
        return np.asarray(state[0], np.int64).ravel()


class _Without:
    """Index of all users except one, with consecutive row numbers."""

    def __init__(self, index: Index, removed: int):
        self._index, self._removed = index, removed
        self.virtual_clients, self.groupings = index.virtual_clients, index.groupings
        self.user_count = index.user_count - 1

    @property
    def user_keys(self) -> np.ndarray:
        """Returns the keys of the remaining users."""
        return np.delete(self._index.user_keys, self._removed)

    def members(self, grouping: int, group: int) -> np.ndarray:
        """Returns the rows among the remaining users."""
        rows = self._index.members(grouping, group)
        rows = rows[rows != self._removed]
        return rows - (rows > self._removed)

    def named(self, client: VirtualClient) -> VirtualClient:
        """Returns the client with row numbers of the store."""
        rows = client.users + (client.users >= self._removed)
        return VirtualClient(client.grouping, client.group, rows)


def _no_client(client: VirtualClient) -> VirtualClient:
    return VirtualClient(client.grouping, client.group, client.users[:0])


def _less(client: VirtualClient, removed: int) -> VirtualClient:
    rows = client.users[client.users != removed]
    return VirtualClient(client.grouping, client.group, rows)


def _names(clients: list[VirtualClient]) -> dict[tuple[int, int], list[int]]:
    """Users of each virtual client; empty clients contribute nothing and can be left out."""
    return {
        (client.grouping, client.group): np.sort(client.users).tolist()
        for client in clients
        if len(client.users)
    }
