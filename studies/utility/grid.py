"""The contests that choose recipes, and the rows that are read once they are decided.

Every network, method and noise is one contest of `TRIES` recipes on validation users. Public
backbones are chosen first; all other tries and all final rows start from the best one of their
network. Private training and centralized training at equal visits use the same number of images;
centralized training at its best may use more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fedemb.config import RunConfig
from fedemb.pipelines.run.load_config import load_config, with_data
from studies.utility.protocol import Stage
from studies.utility.rows import CENTRALIZED, NETS, Method, Net, Row

PRESET = "omniglot_identities"
TRIES = 3
"""Recipes of every contest."""
ROUNDS = 40
USERS = 128
"""Average number of users in a round."""
LOCAL_EPOCHS = 2
SEEDS = (0, 1, 2)
CONTESTS: tuple[tuple[Net, Method, float], ...] = (
    ("lenet", "centralized", 0.0),
    ("lenet", "centralized_best", 0.0),
    ("lenet", "fedemb", 1e-3),
    ("lenet", "fedemb", 1e-2),
    ("lenet", "fedavg", 1e-2),
    ("lenet", "ftrl", 1e-2),
    ("resnet8_s2", "centralized", 0.0),
    ("resnet8_s2", "centralized_best", 0.0),
    ("resnet8_s2", "fedemb", 1e-3),
    ("resnet8_s2", "fedemb", 1e-2),
)
"""Net, method, and standard deviation of the noise on the mean update / clip."""
BEYOND = 3e-2
"""Noise at which the recipe that won at `MOST` is read too."""
MOST = ("lenet", "fedemb", 1e-2)
COSFACE = {"kind": "cosface"}
PASSES = "evaluation.centralized_epochs"
CLIP = "mechanism.l2_norm_clip"
OF_PRESET = ("lenet", "fedemb", 1e-3)
"""The contest whose winner the preset is: the one that ablations change."""


def base_config(data: str) -> RunConfig:
    """Data and model of the preset, and what all recipes share."""
    config = with_data(load_config(PRESET), data)
    return config.updated(
        {
            "training": {
                "mixed_precision": True,
                "local": {
                    "epochs": LOCAL_EPOCHS,
                    "batch_size": 32,
                    "max_examples_per_client": 4096,
                    "client_learning_rate": 0.05,
                    "head_learning_rate_scale": 1.0,
                    "head_init": "prototypes",
                    "loss": COSFACE,
                    "augmentation": {},
                },
                "server": {
                    "learning_rate": 1.0,
                    "momentum": 0.9,
                    "schedule": "cosine",
                    "ema_decay": 0.9,
                },
            },
            "mechanism.rounds": ROUNDS,
            "pretraining.mixed_precision": True,
        }
    )


@dataclass(frozen=True)
class Contest:
    """Recipes of one net, method and noise; the one that reads best on validation people wins.

    Attributes:
      net: all tries are of this net.
      method: and of this method.
      noise: and of this noise.
      tries: `TRIES` rows of the selection stage.
    """

    net: Net
    method: Method
    noise: float
    tries: tuple[Row, ...]

    def winner(self, recall: Mapping[Row, float]) -> Row | None:
        """The try with the highest recall, the first of equal ones; None: not all are there."""
        found = [row for row in self.tries if row in recall]
        return max(found, key=lambda row: recall[row]) if len(found) == len(self.tries) else None


def public_contests() -> list[Contest]:
    """Rows of the public backbones, one per network."""
    return [Contest(net, "public_only", 0.0, _starts(net)) for net in NETS]


def contests(starts: Mapping[Net, Row], people: int) -> list[Contest]:
    """All others.

    Args:
      starts: the start that won, by net; nets without one are left out.
      people: who train in the selection stage, for the passes of equal visits.
    """
    found = []
    for net, method, noise in CONTESTS:
        if net in starts:
            central = method in CENTRALIZED
            tries = _centralized(method, people) if central else _private(method, noise)
            start = starts[net].settings
            rows = (replace(row, net=net, settings={**start, **row.settings}) for row in tries)
            found.append(Contest(net, method, noise, tuple(rows)))
    return found


def final_rows(winners: Sequence[Row], people: Mapping[Stage, int]) -> list[Row]:
    """The rows of the table, net by net and seed by seed: what won, untrained, and more noise.

    Args:
      winners: of all contests, public ones too.
      people: who train, by stage: centralized training keeps its visits per private visit.
    """
    rows: list[Row] = []
    for won in winners:
        if won.method == "public_only":
            rows.append(Row(net=won.net, method="untrained"))
        settings = dict(won.settings)
        if won.method in CENTRALIZED:
            equal = {stage: equal_passes(count) for stage, count in people.items()}
            settings[PASSES] = round(settings[PASSES] * equal["final"] / equal["selection"])
        rows.append(replace(won, settings=settings))
        if (won.net, won.method, won.noise) == MOST:
            rows.append(replace(won, noise=BEYOND))
    return [
        replace(row, stage="final", seed=seed, label="")
        for net in NETS
        for seed in SEEDS
        for row in rows
        if row.net == net
    ]


def ablation_rows(chosen: Row) -> list[Row]:
    """One thing changed at a time, on validation people; the first row is the unchanged recipe."""
    local, server = "training.local", "training.server"

    def changed(label: str, settings: dict[str, Any], **cohort: int) -> Row:
        merged = {**chosen.settings, **settings}
        return replace(chosen, label=label, settings=merged, **cohort)

    def cohort(users: int) -> Row:
        label = f"{users} users per virtual client, {USERS // users} a round"
        return changed(label, {}, users_per_client=users, clients_per_round=USERS // users)

    return [
        changed("unchanged", {}),
        *(cohort(users) for users in (8, 32, 64, 128) if users != chosen.users_per_client),
        changed("no public pretraining", {"pretraining.kind": "none"}),
        changed("random head", {f"{local}.head_init": "glorot"}),
        changed("head rate x25", {f"{local}.head_learning_rate_scale": 25.0}),
        changed("head rate x100", {f"{local}.head_learning_rate_scale": 100.0}),
        changed("convolutions frozen", {"model.trainable": "conv_frozen"}),
        changed("cosine softmax, no margin", {f"{local}.loss": {"kind": "normalized_softmax"}}),
        changed("plain softmax", {f"{local}.loss": {"kind": "softmax"}}),
        changed("ArcFace", {f"{local}.loss": {"kind": "arcface"}}),
        changed("batch-hard triplets", {f"{local}.loss": {"kind": "triplet"}}),
        changed("constant server rate", {f"{server}.schedule": "constant"}),
        changed("no averaging of weights", {f"{server}.ema_decay": 0.0}),
        changed("clip 0.3", {CLIP: 0.3}),
        changed("clip 3", {CLIP: 3.0}),
        changed("a new grouping each round", {"partition.groupings": ROUNDS}),
        changed("local training in float32", {"training.mixed_precision": False}),
    ]


def equal_passes(people: int) -> int:
    """Returns the passes over all images that equal the visits of private training on average.

    The users form groups of about `USERS`, of which one participates in a round.
    """
    return ROUNDS * LOCAL_EPOCHS // max(1, round(people / USERS))


def _starts(net: Net) -> tuple[Row, ...]:
    def start(epochs: int, loss: str, rate: float, batch: int) -> Row:
        return Row(
            label=f"{epochs} epochs, {loss}, rate {rate:g}, batch {batch}",
            net=net,
            method="public_only",
            settings={
                "pretraining.epochs": epochs,
                "pretraining.loss": {"kind": loss},
                "pretraining.learning_rate": rate,
                "pretraining.batch_size": batch,
            },
        )

    return (
        start(60, "normalized_softmax", 0.05, 32),
        start(60, "cosface", 0.1, 64),
        start(120, "cosface", 0.1, 64),
    )


def _centralized(method: Method, people: int) -> tuple[Row, ...]:
    """At equal visits three rates; at its best the rates that are lower, and twice the visits."""
    passes = equal_passes(people)

    def central(rate: float, passes: int) -> Row:
        return Row(
            label=f"{passes} passes, rate {rate:g}",
            method=method,
            learning_rate=rate,
            settings={PASSES: passes},
        )

    if method == "centralized":
        return central(0.05, passes), central(0.02, passes), central(0.1, passes)
    return central(0.05, passes), central(0.02, passes), central(0.05, 2 * passes)


def _private(method: Method, noise: float) -> tuple[Row, ...]:
    """Cohorts of one size cut three ways, with slower servers and smaller clips for more noise.

    Correlated noise adds up to less, so its servers may be faster.
    """

    def private(users: int, server: float, clip: float = 1.0) -> Row:
        clients = USERS // users
        return Row(
            label=f"{clients} x {users} users a round, server {server:g}, clip {clip:g}",
            method=method,
            noise=noise,
            users_per_client=users,
            clients_per_round=clients,
            settings={"training.server.learning_rate": server, CLIP: clip},
        )

    if noise < 3e-3:
        return private(128, 1.0), private(64, 0.3, 3.0), private(32, 1.0)
    if method == "ftrl":
        return private(128, 0.3), private(64, 0.3), private(64, 0.1)
    return private(128, 0.1), private(64, 0.1), private(64, 0.03)
