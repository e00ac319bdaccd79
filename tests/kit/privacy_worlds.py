"""Small worlds for tests of the privacy core: users, groupings, plans."""

import hashlib
from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from fedemb.privacy.mechanism import MechanismPlan
from fedemb.privacy.registry import MECHANISMS
from fedemb.privacy.running import Mechanism, build_mechanism
from studies.shared import Cohort

ROOT = bytes(range(32))
COHORT = Cohort(
    population=80,
    users_per_client=2,
    clients_per_round=10,
    noise_multiplier=1.0,
    rounds=20,
    virtual_clients=40,
)
OTHER_COHORTS = {"tree_aggregation": replace(COHORT, clients_per_round=8)}
"""Where tests count on other numbers; a new mechanism needs no line here."""


class World:
    """Users hashed into virtual clients, as `GroupIndex` would hold them."""

    def __init__(self, user_keys: Iterable[int], virtual_clients: int, groupings: int = 1):
        self.user_keys = np.array(sorted(user_keys), dtype=np.uint64)
        self.user_count = len(self.user_keys)
        self.virtual_clients = virtual_clients
        self.groupings = groupings
        self._groups: dict[int, np.ndarray] = {}

    def group_of(self, user_key: int, grouping: int) -> int:
        digest = hashlib.sha256(f"{grouping}/{user_key}".encode()).digest()
        return int.from_bytes(digest[:8], "big") % self.virtual_clients

    def members(self, grouping: int, group: int) -> np.ndarray:
        if grouping not in self._groups:
            groups = [self.group_of(int(key), grouping) for key in self.user_keys]
            self._groups[grouping] = np.array(groups, dtype=np.int64)
        return np.flatnonzero(self._groups[grouping] == group)


def make_plan(kind: str = "group_poisson_gaussian", **changes) -> MechanismPlan:
    """A small valid plan of each mechanism: as it plans itself for a cohort, with other fields."""
    mechanism, cohort = MECHANISMS[kind], OTHER_COHORTS.get(kind, COHORT)
    fields = {"rounds": cohort.rounds, **cohort.section(mechanism), **changes}
    return mechanism(**{"groupings": 1, "virtual_clients": cohort.virtual_clients, **fields})


def noiseless(clip: float = 0.5, **changes) -> Mechanism:
    """Clips the updates of groups and adds them up; no noise."""
    fields = {"rounds": 10, "noise_multiplier": 0.0, "sampling_probability": 0.5, **changes}
    return build_mechanism(make_plan(l2_norm_clip=clip, **fields), b"k" * 32, "run", 1, "0" * 64)


KINDS = tuple(MECHANISMS)
