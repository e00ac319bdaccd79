"""Small worlds for tests of the privacy core: users, groupings, plans."""

import hashlib
from collections.abc import Iterable

import numpy as np

from fedemb.privacy.mechanisms import blt, tree
from fedemb.privacy.mechanisms.mechanism import AdaptiveClip, MechanismPlan

ROOT = bytes(range(32))


class World:
    """Users hashed into virtual clients, as `GroupIndex` would hold them."""

    def __init__(self, user_keys: Iterable[int], virtual_clients: int, groupings: int = 1):
        self.user_keys = np.array(sorted(user_keys), dtype=np.uint64)
        self.user_count = len(self.user_keys)
        self.virtual_clients = virtual_clients
        self.groupings = groupings

    def group_of(self, user_key: int, grouping: int) -> int:
        digest = hashlib.sha256(f"{grouping}/{user_key}".encode()).digest()
        return int.from_bytes(digest[:8], "big") % self.virtual_clients

    def members(self, grouping: int, group: int) -> np.ndarray:
        rows = [
            row
            for row, key in enumerate(self.user_keys)
            if self.group_of(int(key), grouping) == group
        ]
        return np.array(rows, dtype=np.int64)


def make_plan(kind: str = "group_poisson_gaussian", **changes) -> MechanismPlan:
    """A small valid plan of each mechanism."""
    fields = {
        "kind": kind,
        "rounds": 20,
        "l2_norm_clip": 1.0,
        "noise_multiplier": 0.0 if kind == "not_private" else 1.0,
        "virtual_clients": 40,
        "groupings": 1,
        "sampling_probability": 0.25,
    }
    if kind in ("user_poisson", "fixed_size"):
        fields |= {"clients_per_round": 4}
    if kind == "fixed_size":
        fields |= {"users_per_client": 5, "users_lower_bound": 80}
    if kind in ("tree_aggregation", "blt"):
        fields |= {
            "sampling_probability": None,
            "clients_per_round": 8,
            "min_separation": 5,
            "max_participations": 4,
        }
    fields |= changes
    if kind == "tree_aggregation":
        fields.setdefault("restart_every", 0)
        fields["matrix_sensitivity"] = tree.sensitivity(
            fields["rounds"],
            fields["min_separation"],
            fields["max_participations"],
            fields["restart_every"],
        )
    if kind == "blt":
        fields.setdefault("blt_decay", (0.9, 0.5))
        fields.setdefault("blt_scale", (0.3, 0.2))
        column = blt.coefficients(fields["blt_decay"], fields["blt_scale"], fields["rounds"])
        fields["matrix_sensitivity"] = blt.sensitivity(
            column, fields["min_separation"], fields["max_participations"]
        )
    return MechanismPlan(**fields)


def adaptive(**changes) -> AdaptiveClip:
    fields = {"target_quantile": 0.5, "learning_rate": 0.2, "count_noise_multiplier": 2.0}
    return AdaptiveClip(**(fields | changes))


KINDS = (
    "group_poisson_gaussian",
    "user_poisson",
    "fixed_size",
    "tree_aggregation",
    "blt",
    "not_private",
)
