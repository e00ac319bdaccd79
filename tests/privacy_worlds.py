"""Small worlds for tests of the privacy core: users, groupings, plans."""

import hashlib
from collections.abc import Iterable

import numpy as np

from fedemb.config import AdaptiveClipConfig
from fedemb.privacy.mechanisms import toeplitz, tree_sensitivity
from fedemb.privacy.mechanisms.mechanism import MechanismPlan
from fedemb.privacy.mechanisms.registry import MECHANISMS

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
        "rounds": 20,
        "l2_norm_clip": 1.0,
        "noise_multiplier": 1.0 if MECHANISMS[kind].private else 0.0,
        "virtual_clients": 40,
        "groupings": 1,
        "sampling_probability": 0.25,
    }
    if kind == "poisson_gaussian":
        fields |= {"units_per_round": 20}
    if kind == "capped_image_poisson":
        fields |= {"images_per_round": 20}
    if kind == "random_allocation":
        fields |= {"rounds_per_epoch": 4, "units_per_round": 20}
        del fields["sampling_probability"]
    if kind == "least_squares":
        fields |= {"rounds": 1, "units_per_round": 80}
        del fields["sampling_probability"]
    if kind in ("user_poisson", "fixed_size"):
        fields |= {"clients_per_round": 4}
    if kind == "fixed_size":
        fields |= {"users_per_client": 5, "users_lower_bound": 80}
    if kind in ("tree_aggregation", "blt"):
        fields |= {
            "clients_per_round": 8,
            "min_separation": 5,
            "max_participations": 4,
        }
    fields |= changes
    if MECHANISMS[kind].tracks_participation:
        del fields["sampling_probability"]
    if kind == "tree_aggregation":
        fields.setdefault("restart_every", 0)
        fields["matrix_sensitivity"] = tree_sensitivity.sensitivity(
            fields["rounds"],
            fields["min_separation"],
            fields["max_participations"],
            fields["restart_every"],
        )
    if kind == "blt":
        fields.setdefault("blt_decay", (0.9, 0.5))
        fields.setdefault("blt_scale", (0.3, 0.2))
        column = toeplitz.coefficients(fields["blt_decay"], fields["blt_scale"], fields["rounds"])
        fields["matrix_sensitivity"] = toeplitz.sensitivity(
            column, fields["min_separation"], fields["max_participations"]
        )
    return MECHANISMS[kind](**fields)


def adaptive(**changes) -> AdaptiveClipConfig:
    fields = {"target_quantile": 0.5, "learning_rate": 0.2, "count_noise_multiplier": 2.0}
    return AdaptiveClipConfig(**(fields | changes))


KINDS = tuple(MECHANISMS)
