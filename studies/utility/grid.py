"""Parts of the alphabets, and recipes that are tried: everything fixed before any result.

Recipes are chosen on validation alphabets. Test alphabets are drawn by a keyed permutation of those
that no earlier study evaluated on, and read by final rows only, which run when every contest is
decided. Alphabets of earlier evaluations only train.

Every network, method and noise is one contest of `TRIES` recipes on validation users. Public
backbones are chosen first; all other tries and all final rows start from the best one of their
network. Private training and centralized training at equal visits use the same number of images;
centralized training at its best may use more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

from fedemb.config import RunConfig
from fedemb.foundation.canonical_json import json_digest, sha256_hex
from fedemb.pipelines.run.load_config import load_config, with_data
from fedemb.privacy.group_mechanisms import GroupPoissonGaussian, TreeAggregation
from studies.shared import Cohort

VERSION = 3
"""Version of the rows; a new number recomputes all of them."""
Stage = Literal["selection", "final"]
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
PASSES = "evaluation.centralized_epochs"
CLIP = "mechanism.l2_norm_clip"
OF_PRESET = ("lenet", "fedemb", 1e-3)
"""The contest whose winner the preset is."""


class Split(NamedTuple):
    """Names of the alphabets of each part."""

    public: tuple[str, ...]
    train: tuple[str, ...]
    evaluation: tuple[str, ...]


@dataclass(frozen=True)
class Protocol:
    """A division of the alphabets.

    Attributes:
      name: part of every result; a new draw needs a new name.
      public: pretrains.
      validation: chooses recipes; trains in the final stage.
      judged: trains; earlier studies evaluated on it, so it cannot be a test.
      unread: trains, but for the test alphabets drawn from it.
      tests: number of alphabets drawn for the test.
    """

    name: str
    public: tuple[str, ...]
    validation: tuple[str, ...]
    judged: tuple[str, ...]
    unread: tuple[str, ...]
    tests: int

    @cached_property
    def test(self) -> tuple[str, ...]:
        """Alphabets that final rows are evaluated on, and nothing before them."""
        keyed = sorted(self.unread, key=lambda name: sha256_hex(f"{self.name}/{name}".encode()))
        return tuple(sorted(keyed[: self.tests]))

    def split(self, stage: Stage) -> Split:
        """Returns who trains and who is evaluated.

        `selection` evaluates on the validation alphabets, `final` trains on them too and evaluates
        on the test alphabets.
        """
        rest = (*self.judged, *(name for name in self.unread if name not in self.test))
        if stage == "selection":
            return Split(self.public, rest, self.validation)
        return Split(self.public, (*rest, *self.validation), self.test)


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


OMNIGLOT = Protocol(
    name="omniglot/2",
    public=("Arcadian", "Early_Aramaic", "Sanskrit", "Latin", "Cyrillic"),
    validation=_names("Burmese_(Myanmar) Syriac_(Estrangelo) N_Ko Anglo-Saxon_Futhorc Gujarati"),
    judged=_names(
        "Bengali Blackfoot_(Canadian_Aboriginal_Syllabics) Futurama Hebrew "
        "Inuktitut_(Canadian_Aboriginal_Syllabics) Mkhedruli_(Georgian) "
        "Ojibwe_(Canadian_Aboriginal_Syllabics) Tagalog"
    ),
    unread=_names(
        "Asomtavruli_(Georgian) Japanese_(hiragana) Armenian Tifinagh Braille Alphabet_of_the_Magi "
        "Japanese_(katakana) Korean Grantha Balinese Greek Malay_(Jawi_-_Arabic)"
    ),
    tests=6,
)


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
        chosen = TreeAggregation if self.method == "ftrl" else GroupPoissonGaussian
        cohort = Cohort(
            population=users,
            users_per_client=self.users_per_client,
            clients_per_round=clients,
            noise_multiplier=self.noise * clients,
            rounds=self.settings.get("mechanism.rounds", base.mechanism.rounds),
            virtual_clients=groups,
        )
        fields = cohort.section(chosen)
        mechanism = {"kind": chosen.kind_name(), "l2_norm_clip": 1.0, **fields}
        if self.method == "ftrl":  # set to equal utility when the plan is made
            mechanism["noise_multiplier"] = 1.0
        first = {"mechanism": mechanism, "partition.virtual_clients": groups}
        fixed = {
            "model.backbone": self.net,
            "training.algorithm": "dp_fedavg" if self.method == "fedavg" else "dp_fedemb",
            "training.seed": self.seed,
            "evaluation.false_accept_rates": (1e-3, 1e-2),
        }
        return base.updated(first | dict(self.settings) | fixed)

    def digest(self, data_sha: str, split: Split) -> str:
        """Name of the row's result; both centralized methods share a training."""
        method: Method = "centralized" if self.method in CENTRALIZED else self.method
        row = asdict(replace(self, label="", method=method))
        tree = {"version": VERSION, "row": row, "split": split._asdict(), "data": data_sha}
        return json_digest(tree)[:24]


def base_config(data: str) -> RunConfig:
    """Data, model and training of the preset, which all recipes share; changes need a `VERSION`."""
    return with_data(load_config(PRESET), data)


@dataclass(frozen=True)
class Contest:
    """`TRIES` recipes of one net, method and noise; the best one on validation people wins."""

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
    recipes = ((60, "normalized_softmax", 0.05, 32), (60, "cosface", 0.1, 64))
    rows = [
        Row(
            label=f"{epochs} epochs, {loss}, rate {rate:g}, batch {batch}",
            method="public_only",
            settings={
                "pretraining.epochs": epochs,
                "pretraining.loss": {"kind": loss},
                "pretraining.learning_rate": rate,
                "pretraining.batch_size": batch,
            },
        )
        for epochs, loss, rate, batch in (*recipes, (120, "cosface", 0.1, 64))
    ]
    return [
        Contest(net, "public_only", 0.0, tuple(replace(row, net=net) for row in rows))
        for net in NETS
    ]


def contests(starts: Mapping[Net, Row], people: int) -> list[Contest]:
    """All others.

    Args:
      starts: the public backbone that won, by net; nets without one are left out.
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


def equal_passes(people: int) -> int:
    """Returns the passes over all images that equal the visits of private training on average.

    The users form groups of about `USERS`, of which one participates in a round.
    """
    return ROUNDS * LOCAL_EPOCHS // max(1, round(people / USERS))


def _centralized(method: Method, people: int) -> list[Row]:
    """At equal visits three rates; at its best the rates that are lower, and twice the visits."""
    equal = equal_passes(people)
    last = (0.1, equal) if method == "centralized" else (0.05, 2 * equal)
    return [
        Row(
            label=f"{passes} passes, rate {rate:g}",
            method=method,
            learning_rate=rate,
            settings={PASSES: passes},
        )
        for rate, passes in ((0.05, equal), (0.02, equal), last)
    ]


def _private(method: Method, noise: float) -> list[Row]:
    """Cohorts of one size cut three ways, with slower servers and smaller clips for more noise.

    Correlated noise adds up to less, so its servers may be faster.
    """
    recipes: tuple[tuple[int, float, float], ...]
    if noise < 3e-3:
        recipes = ((128, 1.0, 1.0), (64, 0.3, 3.0), (32, 1.0, 1.0))
    elif method == "ftrl":
        recipes = ((128, 0.3, 1.0), (64, 0.3, 1.0), (64, 0.1, 1.0))
    else:
        recipes = ((128, 0.1, 1.0), (64, 0.1, 1.0), (64, 0.03, 1.0))
    return [
        Row(
            label=f"{USERS // users} x {users} users a round, server {server:g}, clip {clip:g}",
            method=method,
            noise=noise,
            users_per_client=users,
            clients_per_round=USERS // users,
            settings={"training.server.learning_rate": server, CLIP: clip},
        )
        for users, server, clip in recipes
    ]
