"""Recipes of `fedemb init`, read from recipes.yaml, and which of them to take."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path

import yaml
from pydantic import BaseModel, ConfigDict

Section = dict[str, object]

FROM_SCRATCH = 1_000_000
"""Smallest number of units for which a classifier without public data trains the whole net."""
SOLVED_FROM_NOISE = 0.025
"""Noise of a trained head (`training_noise`) from which a head solved from one round is better:
CIFAR-10 on EfficientNet-Lite2 (studies/photos), 45,000 images: 80.9 and 79.4 at noise 0.014, 78.6
and 78.6 at 0.027; 10,000 images: 77.7 and 78.3 at 0.032, 73.9 and 76.8 at 0.061."""
PROJECTIONS = ("projection_of_many", "projection_of_some", "projection_of_few")


class Recipe(BaseModel):
    """Defaults for one kind of training.

    Attributes:
      users_per_client: mean number of users per virtual client; 0: units are sampled.
      most_noise: noise on the mean / clipping norm up to which the recipe is taken.
      principal_directions: leading directions of imported features that are read, if public photos
          give the constants; 0: all.
      whitened_directions: leading directions of imported features that are scaled down.
      most_learning_rate: largest learning rate of a head, see `head_learning_rate`.
      rate_times_noise: product of learning rate and noise of a head.
      model: settings of the section `model`.
      mechanism: settings of the section `mechanism`.
      sampling_probability: smallest probability that a virtual client or unit is in a round; None
          for mechanisms that do not sample.
      algorithm: algorithm of the section `training`.
      local: its settings of local training.
      server: its settings of the server.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    users_per_client: int = 0
    most_noise: float = math.inf
    principal_directions: int = 0
    whitened_directions: int = 0
    most_learning_rate: float = 0.0
    rate_times_noise: float = 2.0
    model: Section
    mechanism: Section
    sampling_probability: float | None = None
    algorithm: str = "dp_fedemb"
    local: Section = {}
    server: Section = {}

    @property
    def classifies(self) -> bool:
        """Whether the recipe is for classifiers."""
        return self.algorithm == "dp_sgd"


@cache
def recipes() -> dict[str, Recipe]:
    """Returns all recipes by name."""
    found = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
    return {name: Recipe.model_validate(recipe) for name, recipe in found.items()}


def head_learning_rate(noise: float, recipe: Recipe) -> float:
    """Returns the learning rate of a head: by the noise, at most that of the recipe, two digits.

    Best rates, momentum 0.9. Scattering features, sign digits, 60 rounds: 40, 10 and 3 at noise
    0.09, 0.22 and 0.58. EfficientNet-Lite2, CIFAR-10, 80 rounds: 60, 40, 25 and 15 at noise 0.0021,
    0.0072, 0.014 and 0.027, and with 10,000 images 10 and 5 at 0.032 and 0.061 (studies/photos).

    Args:
      noise: length of the noise of the whole training / clipping norm (`training_noise`).
      recipe: recipe of the head.
    """
    return float(f"{min(recipe.most_learning_rate, recipe.rate_times_noise / noise):.2g}")
