"""The grid: every row is a method, a noise, a seed and settings of the run's own configuration."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from fedemb.config import RunConfig
from fedemb.foundation.canonical_json import json_digest
from fedemb.privacy.group_mechanisms import GroupPoissonGaussian, NotPrivate, TreeAggregation
from studies.cohort import Cohort
from studies.utility.protocol import Split, Stage

VERSION = 2
"""Version of the rows; a new number recomputes all of them."""
Net = Literal["lenet", "resnet8_s2"]
NETS: tuple[Net, ...] = ("lenet", "resnet8_s2")
Method = Literal[
    "untrained", "public_only", "centralized", "centralized_best", "fedemb", "fedavg", "ftrl"
]
METHODS: dict[Method, str] = {
    "untrained": "untrained",
    "public_only": "public backbone",
    "centralized": "centralized, equal visits",
    "centralized_best": "centralized, at its best",
    "fedemb": "DP-FedEmb",
    "fedavg": "DP-FedAvg",
    "ftrl": "DP-FTRL-FedEmb",
}
"""Names for people. `centralized_best` is the same training with as many visits as help."""
CENTRALIZED: tuple[Method, ...] = ("centralized", "centralized_best")
IN_ROUNDS: tuple[Method, ...] = ("fedemb", "fedavg", "ftrl")
FALSE_ACCEPT_RATES = (1e-3, 1e-2)
MEASURED = ("false_accept_rates", "bootstrap_samples", "resample_subgroups", "batch_size")
"""Settings of the section `evaluation` that affect a result."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Row:
    """One training and its evaluation.

    Attributes:
      label: for people; does not enter the digest.
      stage: which people it trains on and is evaluated on.
      net: the backbone.
      method: what is trained.
      noise: standard deviation of the noise on the mean / clip; 0 without.
      seed: initial weights and shuffles. Never groups, coins or noise.
      users_per_client: users per virtual client, on average.
      clients_per_round: virtual clients per round, on average.
      learning_rate: of centralized training, the highest.
      settings: dotted keys of `RunConfig`, on top of the base.
    """

    label: str = ""
    stage: Stage = "selection"
    net: Net = "lenet"
    method: Method
    noise: float = 0.0
    seed: int = 0
    users_per_client: int = 32
    clients_per_round: int = 4
    learning_rate: float = 0.05
    settings: Mapping[str, Any] = field(default_factory=dict)

    def config(self, base: RunConfig, users: int) -> RunConfig:
        """The run that this row is a part of.

        Args:
          base: data, model and public backbone.
          users: people who train, for the number of virtual clients.

        Raises:
          pydantic.ValidationError: a setting is unknown or out of bounds.
        """
        clients = self.clients_per_round
        groups = max(clients, round(users / self.users_per_client))
        rounds = self.settings.get("mechanism.rounds", base.mechanism.rounds)
        chosen = TreeAggregation if self.method == "ftrl" else GroupPoissonGaussian
        if not self.noise and self.method != "ftrl":
            chosen = NotPrivate
        cohort = Cohort(
            population=users,
            users_per_client=self.users_per_client,
            clients_per_round=clients,
            noise_multiplier=self.noise * clients or 1.0,
            rounds=rounds,
            virtual_clients=groups,
        )
        fields = cohort.section(chosen)
        mechanism = {"kind": chosen.kind_name(), "l2_norm_clip": 1.0, **fields}
        if self.method == "ftrl":  # set to equal utility when the plan is made
            mechanism["noise_multiplier"] = 1.0
        algorithm = "dp_fedavg" if self.method == "fedavg" else "dp_fedemb"
        first = {"mechanism": mechanism, "partition.virtual_clients": groups}
        fixed = {
            "model.backbone": self.net,
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
        if self.method in CENTRALIZED:
            parts["learning_rate"] = self.learning_rate
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
                "method": "centralized" if self.method in CENTRALIZED else self.method,
                "settings": parts,
                "split": split._asdict(),
                "data": data_sha,
            }
        )
