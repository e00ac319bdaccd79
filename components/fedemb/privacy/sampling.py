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

from fedemb.errors import PlanMismatch
from fedemb.keys import derive
from fedemb.privacy.group_mechanisms import TreeAggregation
from fedemb.privacy.mechanism import MechanismPlan
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


def sample(
    plan: MechanismPlan, coin_key: bytes, round_index: int, index: Index
) -> list[VirtualClient]:
    """Draws the participants of a round: a function of only coins, round and index.

    Args:
      plan: the mechanism; its event accounts for this sampler.
      coin_key: `noise.run_key(root, "coins", ...)`.
      round_index: the round.
      index: the users.

    Raises:
      PlanMismatch: the index was built for another partition, the round is not planned, or it does
        not fit the plan or the capacity of one sum.
    """
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
    if isinstance(plan, TreeAggregation):
        return sample_in_order(plan, coin_key, round_index, index)
    round_key, chance = derive(coin_key, "round", str(round_index)), plan.chance
    assert chance is not None, f"{plan.kind} neither samples nor takes turns"
    if plan.samples_images:
        return sample_images(plan.images_per_user, chance, round_key, index)
    if plan.samples_units:
        return sample_units(chance, round_key, index)
    return sample_groups(plan, chance, round_key, round_index, index)


def sample_groups(
    plan: MechanismPlan, probability: float, round_key: bytes, round_index: int, index: Index
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
    keys = index.user_keys
    if len(keys) > MOST_UNITS:
        raise PlanMismatch(
            f"more than {MOST_UNITS} units could overflow 64-bit sums; train on fewer of them"
        )
    return _alone(0, heads(user_words(round_key, keys), probability), keys)


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
        words = user_words(derive(round_key, "image", str(place)), keys)
        found += _alone(place, heads(words, probability), keys)
    return found


def _alone(place: int, sampled: npt.NDArray[np.bool_], keys: Words) -> list[VirtualClient]:
    """Returns the sampled units, each separate and identified by its keyed hash."""
    rows = np.flatnonzero(sampled).astype(np.int64)
    return [VirtualClient(place, int(keys[row]), rows[i : i + 1]) for i, row in enumerate(rows)]


def sample_in_order(
    plan: TreeAggregation, coin_key: bytes, round_index: int, index: Index
) -> list[VirtualClient]:
    """Samples all virtual clients in turn, in a keyed order, with maximum separation.

    Raises:
      PlanMismatch: a virtual client would participate too often or too soon for the price.
    """
    order = np.argsort(coins(derive(coin_key, "order"), plan.virtual_clients))
    positions = np.arange((round_index + 1) * plan.clients_per_round) % plan.virtual_clients
    check_participations(plan, order[positions].reshape(round_index + 1, -1))
    return [
        VirtualClient(0, group, np.sort(index.members(0, group)))
        for group in sorted(map(int, order[positions[-plan.clients_per_round :]]))
    ]


def check_participations(plan: TreeAggregation, groups: Rows) -> None:
    """Checks the virtual clients of all rounds so far, `[rounds, clients]`, against the price.

    Raises:
      PlanMismatch: one participates twice within `min_separation` rounds, or too often.
    """
    close = groups[-plan.min_separation :]
    if len(np.unique(close)) < close.size or np.bincount(groups.ravel()).max() > (
        plan.max_participations
    ):
        raise PlanMismatch(
            f"a virtual client of round {len(groups) - 1} participates more than "
            f"{plan.max_participations} times, or twice within {plan.min_separation} rounds, "
            "against the plan; report this bug"
        )


def user_words(key: bytes, user_keys: UInt64[np.ndarray, " users"]) -> UInt64[np.ndarray, " users"]:
    """Returns a word per user, `[users]`: AES-256 of the hash, a keyed permutation.

    ChaCha20 has no cheap random access by 64-bit name; one block cipher call covers all users.
    """
    blocks = np.zeros((len(user_keys), 2), dtype="<u8")
    blocks[:, 0] = user_keys
    # ECB on distinct blocks is a random function up to the birthday bound of 2^64 users.
    encryptor = Cipher(algorithms.AES256(key), modes.ECB()).encryptor()
    words = np.frombuffer(encryptor.update(blocks.tobytes()), dtype="<u8").reshape(-1, 2)
    return words[:, 0].astype(np.uint64)
