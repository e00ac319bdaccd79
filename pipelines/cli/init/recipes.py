"""Recipes of `fedemb init`: what to train, for each task, public backbone and number of users.

| public backbone | embedding | classifier |
|---|---|---|
| `.keras` file with a card, and photos | covariance of its features, one round | head on them |
| other `.keras` file | projection, every virtual client in every round | head on its features |
| photos | whole net | head on the pretrained net |
| none | whole net | head on scattering features; the whole net from a million units |

Evidence: covariances, projections and heads on EfficientNet-Lite2, studies/photos; heads on
scattering features, studies/dp_sgd; whole nets, docs/explanation/results.md. Fewer trained weights
need less noise, so a whole net is the last choice.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TypedDict

Section = dict[str, object]


class Training(TypedDict, total=False):
    """Settings of the section `training`."""

    algorithm: str
    local: Section
    server: Section
    unit_gradient: Section


@dataclass(frozen=True, kw_only=True)
class EmbeddingRecipe:
    """Defaults for an embedding.

    Attributes:
      users_per_client: mean number of users per virtual client.
      rounds: training rounds.
      sampling_probability: smallest probability that a virtual client is in a round.
      most_noise: noise on the mean / clipping norm up to which the recipe is taken.
      solved: whether the projection is solved from covariances of all users, in one round.
      model: settings of the section `model`.
      training: settings of the section `training`.
    """

    users_per_client: int
    rounds: int
    sampling_probability: float
    most_noise: float = math.inf
    solved: bool = False
    model: Section
    training: Training = field(default_factory=Training)


_PROTOTYPES: Section = {"head_init": "prototypes", "head_learning_rate_scale": 12.0}
WHOLE_NET = EmbeddingRecipe(
    users_per_client=32,
    rounds=30,
    sampling_probability=0.1,
    model={"backbone": "resnet8"},
    training={"local": _PROTOTYPES},
)


def _projection(
    users_per_client: int, rounds: int, most_noise: float, learning_rate: float
) -> EmbeddingRecipe:
    local: Section = {
        "epochs": 5,
        "batch_size": 4096,
        "max_examples_per_client": 4096,
        "client_learning_rate": learning_rate,
        "client_momentum": 0.0,
        "head_learning_rate_scale": 0.0,
        "head_init": "prototypes",
        "refresh_prototypes": True,
        "loss": {"kind": "cosface", "scale": 12.0, "margin": 0.1},
    }
    server: Section = {"learning_rate": 1.0, "momentum": 0.0, "ema_decay": 0.9}
    return EmbeddingRecipe(
        users_per_client=users_per_client,
        rounds=rounds,
        sampling_probability=1.0,
        most_noise=most_noise,
        model={
            "backbone": "imported",
            "embedding_dim": 128,
            "projection_bias": False,
            "trainable": "projection",
            "keep_public_features": 1.0,
        },
        training={"local": local, "server": server},
    )


PROJECTIONS = (
    _projection(40, 80, 0.01, 0.6),
    _projection(20, 40, 0.03, 1.2),
    _projection(10, 40, math.inf, 1.2),
)
"""Projections for many to few users: larger virtual clients learn better and need more users."""

WHITENING = EmbeddingRecipe(
    users_per_client=32,
    rounds=1,
    sampling_probability=1.0,
    solved=True,
    model={"backbone": "imported", "trainable": "projection"},
    training={"algorithm": "dp_covariance", "server": {"ridge": 0.25}},
)
"""Gains more than a projection, and with fewer users; needs features scaled by public photos."""

FROM_SCRATCH = 1_000_000
"""Smallest number of units for which a classifier without public data trains the whole net."""
SCATTERING_PIXELS = 32
PRINCIPAL_DIRECTIONS = 256
"""Directions of imported features that a projection reads, if public photos give the constants."""
COVARIANCE_DIRECTIONS = 512
"""Maximum directions of imported features whose covariance is released."""
WHITENED_DIRECTIONS = 300
"""Leading directions of a head's features that are scaled down."""


@dataclass(frozen=True, kw_only=True)
class ClassifierRecipe:
    """Defaults for a classifier.

    Attributes:
      rounds: training rounds.
      chance: probability that a unit is in a round.
      clip: clipping norm of the gradient of a unit.
      learning_rate: learning rate of the server; None: by the noise, see `head_learning_rate`.
      most_learning_rate: largest rate by the noise.
      rate_times_noise: product of learning rate and noise of a head, see `head_learning_rate`.
      momentum: momentum of the server.
      schedule: schedule of the learning rate.
    """

    rounds: int
    chance: float
    clip: float
    learning_rate: float | None
    most_learning_rate: float
    rate_times_noise: float = 2.0
    momentum: float
    schedule: str


ALL_LAYERS = ClassifierRecipe(
    rounds=200,
    chance=0.1,
    clip=1.0,
    learning_rate=2.0,
    most_learning_rate=2.0,
    momentum=0.0,
    schedule="cosine",
)
HEAD = ClassifierRecipe(
    rounds=60,
    chance=1.0,
    clip=0.1,
    learning_rate=None,
    most_learning_rate=40.0,
    momentum=0.9,
    schedule="linear",
)
"""Features are computed once, so a round of all units costs little."""
IMPORTED_HEAD = ClassifierRecipe(
    rounds=80,
    chance=1.0,
    clip=0.1,
    learning_rate=None,
    most_learning_rate=60.0,
    rate_times_noise=0.33,
    momentum=0.9,
    schedule="cosine",
)


SOLVED_FROM_NOISE = 0.025
"""Noise of a trained head (`training_noise`) from which a head solved from one round is better:
CIFAR-10 on EfficientNet-Lite2 (studies/photos), 45,000 images: 80.9 and 79.4 at noise 0.014, 78.6
and 78.6 at 0.027; 10,000 images: 77.7 and 78.3 at 0.032, 73.9 and 76.8 at 0.061."""
SOLVED_DIRECTIONS = 150
"""Leading directions of the features that a solved head reads."""
SOLVED_RIDGE = 2.0


def head_learning_rate(noise: float, recipe: ClassifierRecipe) -> float:
    """Returns the learning rate of a head: by the noise, at most that of the recipe, two digits.

    Best rates, momentum 0.9. Scattering features, sign digits, 60 rounds: 40, 10 and 3 at noise
    0.09, 0.22 and 0.58. EfficientNet-Lite2, CIFAR-10, 80 rounds: 60, 40, 25 and 15 at noise 0.0021,
    0.0072, 0.014 and 0.027, and with 10,000 images 10 and 5 at 0.032 and 0.061 (studies/photos).

    Args:
      noise: length of the noise of the whole training / clipping norm (`training_noise`).
      recipe: recipe of the head.
    """
    return float(f"{min(recipe.most_learning_rate, recipe.rate_times_noise / noise):.2g}")
