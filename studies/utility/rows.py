"""The grid: every row is a method, a noise, a seed and settings of the run's own configuration."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from fedemb.config import RunConfig
from fedemb.documents.artifacts import json_digest
from fedemb.privacy.planning.extrapolation import cyclic_participation
from studies.utility.protocol import Split, Stage

VERSION = 1
"""Of what a row means; a new number recomputes all of them."""
Method = Literal["untrained", "public_only", "centralized", "fedemb", "fedavg", "ftrl"]
METHODS: dict[Method, str] = {
    "untrained": "untrained",
    "public_only": "public only",
    "centralized": "centralized, not private",
    "fedemb": "DP-FedEmb",
    "fedavg": "DP-FedAvg",
    "ftrl": "DP-FTRL-FedEmb",
}
"""Names for people; `fedemb` without noise is the non-private FedEmb."""
NOISE = (3e-4, 1e-3, 3e-3, 1e-2)
"""Standard deviation of the noise on the mean update / clip."""
IN_ROUNDS: tuple[Method, ...] = ("fedemb", "fedavg", "ftrl")
FALSE_ACCEPT_RATES = (1e-3, 1e-2)
MEASURED = ("false_accept_rates", "bootstrap_samples", "batch_size")
"""What of the evaluation section decides a result."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One training and its evaluation.

    Attributes:
      label: for people; does not enter the digest.
      stage: which people it trains on and is evaluated on.
      method: what is trained.
      noise: standard deviation of the noise on the mean / clip; 0 without.
      seed: initial weights and shuffles. Never groups, coins or noise.
      users_per_client: users per virtual client, on average.
      clients_per_round: virtual clients per round, on average.
      settings: dotted keys of `RunConfig`, on top of the base.
    """

    label: str = ""
    stage: Stage = "selection"
    method: Method
    noise: float = 0.0
    seed: int = 0
    users_per_client: int = 32
    clients_per_round: int = 4
    settings: Mapping[str, Any] = field(default_factory=dict)

    def config(self, base: RunConfig, users: int) -> RunConfig:
        """The run that this row is a part of.

        Args:
          base: data, model and public start.
          users: people who train, for the number of virtual clients.

        Raises:
          pydantic.ValidationError: a setting is unknown or out of bounds.
        """
        clients = self.clients_per_round
        groups = max(clients, round(users / self.users_per_client))
        rounds = self.settings.get("mechanism.rounds", base.mechanism.rounds)
        mechanism = {"rounds": rounds, "l2_norm_clip": 1.0}
        if self.method == "ftrl":
            separation, most = cyclic_participation(groups, clients, rounds)
            mechanism |= {
                "kind": "tree_aggregation",
                "noise_multiplier": 1.0,
                "clients_per_round": clients,
                "min_separation": separation,
                "max_participations": most,
            }
        else:
            mechanism |= {"kind": "not_private", "sampling_probability": clients / groups}
            if self.noise:
                multiplier = self.noise * clients
                mechanism |= {"kind": "group_poisson_gaussian", "noise_multiplier": multiplier}
        algorithm = "dp_fedavg" if self.method == "fedavg" else "dp_fedemb"
        first = {"mechanism": mechanism, "partition.virtual_clients": groups}
        fixed = {
            "training.algorithm": algorithm,
            "training.seed": self.seed,
            "evaluation.false_accept_rates": FALSE_ACCEPT_RATES,
        }
        return base.updated(first | dict(self.settings) | fixed)

    def digest(self, base: RunConfig, data_sha: str, split: Split) -> str:
        """Name of the row in the cache: everything that decides its result, and nothing else."""
        config = self.config(base, math.ceil(self.users_per_client * self.clients_per_round))
        tree = config.model_dump(mode="json")
        parts: dict[str, Any] = {
            "model": tree["model"],
            "seed": self.seed,
            "evaluation": [tree["evaluation"][name] for name in MEASURED],
        }
        if self.method != "untrained":
            parts["pretraining"] = {**tree["pretraining"], "source": None}
        if self.method == "centralized":
            parts["loss"] = tree["training"]["local"]["loss"]
            parts["augmentation"] = tree["training"]["local"]["augmentation"]
            parts["epochs"] = tree["evaluation"]["centralized_epochs"]
        if self.method in IN_ROUNDS:
            parts["training"] = tree["training"]
            parts["mechanism"] = tree["mechanism"]
            parts["noise"] = self.noise
            parts["cohort"] = [self.users_per_client, self.clients_per_round]
            parts["groupings"] = config.partition.groupings
        return json_digest(
            {
                "version": VERSION,
                "method": self.method,
                "settings": parts,
                "split": split._asdict(),
                "data": data_sha,
            }
        )
