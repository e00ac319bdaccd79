"""Settings that `fedemb init` chooses: backbone, recipe and plan."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NotRequired, TypedDict, get_args

import yaml
from pydantic import BaseModel, ConfigDict

from fedemb.config import PretrainingConfig, RunConfig
from fedemb.config.policy import PRIVATE_FOLDERS
from fedemb.data.columns import guess_source
from fedemb.errors import ConfigError, InputError
from fedemb.models.backbone_files import BackboneCard, read_card
from fedemb.models.imported import check_import, image_shape, known_pixels, with_card
from fedemb.pipelines.cli.init_photos import Photos, absolute
from fedemb.pipelines.cli.planned import PROTECTS_UP_TO, calibrated
from fedemb.pipelines.output import say
from fedemb.pipelines.run.load_config import validate
from fedemb.privacy.registry import plan_mechanism
from fedemb.reports.privacy_text import participants
from fedemb.training.noise_warnings import forecast, noise_on_mean, training_noise, warnings

Section = dict[str, object]

WHITENINGS = ("whitening_of_many", "whitening_of_few")
PROJECTIONS = ("projection_of_many", "projection_of_some", "projection_of_few")


class Recipe(BaseModel):
    """Defaults for one kind of training.

    Attributes:
      users_per_client: mean number of users per virtual client; 0: units are sampled.
      most_noise: noise on the mean / clipping norm up to which the recipe is taken.
      taps: taps whose features are joined, if the card of the file has them.
      principal_directions: leading directions of imported features that are read, if public photos
          give the constants; 0: all.
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
    taps: tuple[str, ...] = ("head", "last_block")
    principal_directions: int = 0
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
    found = yaml.safe_load(Path(__file__).with_name("recipes.yaml").read_text())
    return {name: Recipe.model_validate(recipe) for name, recipe in found.items()}


def head_learning_rate(noise: float, recipe: Recipe) -> float:
    """Returns the learning rate of a head: by the noise, at most that of the recipe, two digits.

    Best rates, momentum 0.9. Scattering features, sign digits, 60 rounds: 40, 10 and 3 at noise
    0.09, 0.22 and 0.58. EfficientNet-Lite2, CIFAR-10, 80 rounds: 50, 33, 9 and 1.4 at noise 0.004,
    0.0061, 0.011 and 0.037 (studies/photos).

    Args:
      noise: length of the noise of the whole training / clipping norm (`training_noise`).
      recipe: recipe of the head.
    """
    return float(f"{min(recipe.most_learning_rate, recipe.rate_times_noise / noise):.2g}")


def head_directions(noise: float) -> int:
    """Returns how many leading directions of the features a head reads.

    More of them tell more and add more noise. Best numbers for EfficientNet-Lite2 on CIFAR-10, all
    measured in studies/photos: 41, 128, 190 to 285, and 800 at noise 0.0038, 0.0013, 0.00038
    and 0.000086.

    Args:
      noise: noise on the mean of one coordinate over the whole training / clipping norm.
    """
    return max(16, min(800, round(0.63 * noise**-0.75)))


@dataclass(frozen=True, kw_only=True)
class Backbone:
    """Public backbone of a training.

    Attributes:
      pretraining: the section `pretraining` of the configuration.
      shape: input size and channels that a `.keras` file fixes; None if it fixes none.
      card: card of a `.keras` file; None if it has none.
    """

    pretraining: Section
    shape: tuple[int, int] | None = None
    card: BackboneCard | None = None

    @property
    def imported(self) -> bool:
        """Whether the backbone is a `.keras` file."""
        return self.pretraining["kind"] == "import"

    @property
    def standardised(self) -> bool:
        """Whether the number of features of a file is known, and public photos give constants."""
        return self.card is not None and "source" in self.pretraining

    def features(self, recipe: Recipe) -> Section:
        """Returns settings of the features of a `.keras` file that a recipe reads."""
        if not self.imported:
            return {}
        if self.card is None and recipe.classifies:  # their number is not known
            return {"projection": True, "trainable": "projection", "embedding_dim": 64}
        taps = [tap for tap in self.card.taps if tap.name in recipe.taps] if self.card else []
        width = sum(tap.features for tap in taps) or (self.card.features if self.card else 0)
        found: Section = {}
        directions = 0
        if "source" in self.pretraining:
            directions = min(recipe.principal_directions, width or recipe.principal_directions)
            found = {"square_root": True, "principal_directions": directions}
        if taps and (found or recipe.classifies):
            found["taps"] = [tap.name for tap in taps]
        if "embedding_dim" not in recipe.model:
            found["embedding_dim"] = directions or width
        return found


def backbone_of(start: str, photos: str | None, pixels: str | None) -> Backbone:
    """Returns the backbone for `--public`.

    Args:
      start: public photos, a `.keras` file or `none`.
      photos: public photos for the constants of a `.keras` file's features.
      pixels: pixel format of the `.keras` file; None to read it from the file.

    Raises:
      ConfigError: the pixel format is unknown or not for this backbone.
      InputError: the file does not exist.
    """
    if start.endswith(".keras"):
        return _imported(Path(start), photos, pixels)
    if photos:
        raise ConfigError(
            f"--public-photos is for a .keras file, and --public is {start}. Drop --public-photos."
        )
    if pixels:
        raise ConfigError(f"--pixels is for a .keras file, and --public is {start}. Drop --pixels.")
    if start == "none":
        return Backbone(pretraining={"kind": "none"})
    loss = {"kind": "cosface"}
    return Backbone(
        pretraining={"kind": "supervised", "source": _source(start), "loss": loss, "epochs": 30}
    )


def _source(photos: str) -> Section:
    if "://" not in photos and not Path(photos).exists():
        raise InputError(f"{photos} does not exist. Pass public photos, a .keras file or none.")
    found = guess_source(absolute(photos), {}, owned=False)
    return found.model_dump(mode="json", exclude_defaults=True)


def _imported(path: Path, photos: str | None, pixels: str | None) -> Backbone:
    check_import(path, "projection")
    section: Section = {"kind": "import", "import_path": absolute(str(path))}
    section["import_pixels"] = _pixel_format(path, pixels)
    found = with_card(path, PretrainingConfig.model_validate(section))
    fields = {"licence", "provenance"}
    section |= found.model_dump(mode="json", include=fields, exclude_defaults=True)
    if photos:
        section["source"] = _source(photos)
    else:
        say("no --public-photos: the features are not standardised, which costs accuracy")
    return Backbone(pretraining=section, shape=image_shape(path), card=read_card(path))


def _pixel_format(path: Path, given: str | None) -> str:
    """Returns the pixel format that the file was trained on."""
    known = known_pixels(path)
    if given is None and known:
        say(f"{path.name} expects pixels in {known[0]}, read from {known[1]} (see --pixels)")
        return known[0]
    kinds = get_args(PretrainingConfig.model_fields["import_pixels"].annotation)
    if given is None or given not in kinds:
        raise ConfigError(
            f"--pixels is {given or 'missing'}. Pass the format that {path.name} was trained on, "
            f"one of {', '.join(kinds)}."
        )
    if known and known[0] != given:
        say(f"warning: --pixels is {given}, but {known[1]} implies {known[0]}")
    return given


class Training(TypedDict):
    """Settings of the section `training`."""

    algorithm: str
    local: NotRequired[Section]
    server: Section
    unit_gradient: NotRequired[Section]


class Settings(TypedDict):
    """Sections of a configuration, as they are written."""

    purpose: str
    task: str
    data: Section
    partition: Section
    model: Section
    pretraining: Section
    mechanism: Section
    training: Training
    policy: Section


_LEAST_CLIENTS = 8
"""Smallest expected number of virtual clients in a round, if there are as many."""


@dataclass(frozen=True, kw_only=True)
class Goal:
    """Public description of a training and its promise.

    Attributes:
      photos: the photos; their counts are not read.
      start: public backbone.
      users_lower_bound: public lower bound on the number of units of privacy.
      epsilon: epsilon of one run, and the cap of the policy.
      classes: classes of a classifier, or held-out classes of an embedding.
    """

    photos: Photos
    start: Backbone
    users_lower_bound: int
    epsilon: float
    classes: Sequence[str] = ()

    def settings(self, recipe: Recipe) -> Settings:
        """Returns the settings of a recipe; the noise is not yet chosen."""
        bound, photos, classifies = self.users_lower_bound, self.photos, recipe.classifies
        partition: Section = {"virtual_clients": 1, "evaluation": self._evaluation(classifies)}
        mechanism: Section = {**recipe.mechanism, "noise_multiplier": 1.0}
        chance = recipe.sampling_probability
        if recipe.users_per_client:
            clients = max(1, round(0.9 * bound / recipe.users_per_client))
            partition["virtual_clients"] = clients
            chance = round(min(1.0, max(chance or 1.0, _LEAST_CLIENTS / clients)), 3)
        else:
            mechanism["units_per_round"] = max(1, round(0.9 * bound * (chance or 1.0)))
        if chance is not None:
            mechanism["sampling_probability"] = chance
        training: Training = {"algorithm": recipe.algorithm, "server": dict(recipe.server)}
        if recipe.local:
            training["local"] = recipe.local
        if recipe.most_learning_rate:
            training["server"]["learning_rate"] = recipe.most_learning_rate
        if classifies:
            partition["max_images_per_user"] = 1 if photos.of_images else 64
            each = 1 if photos.of_images else 4
            training["unit_gradient"] = {"images_per_unit": each, "microbatch": min(64, bound)}
        source = photos.source.model_dump(mode="json", exclude_defaults=True)
        source["label_scope"] = "global" if classifies or shares_classes(photos) else "user"
        return {
            "purpose": "simulation",
            "task": "classification" if classifies else "embedding",
            "data": {"source": source},
            "partition": partition,
            "model": self._model(recipe),
            "pretraining": self.start.pretraining,
            "mechanism": mechanism,
            "training": training,
            "policy": {
                "policy_id": policy_id(Path(photos.source.uri).stem),
                "users_lower_bound": bound,
                "delta": customary_delta(bound),
                "composition": "planned",
                "epsilon_cap": self.epsilon,
                "unit": "image" if photos.of_images else "user",
            },
        }

    def _evaluation(self, classifies: bool) -> Section:
        held_out = {} if classifies or not self.classes else {"classes": list(self.classes)}
        return {"by": "hash", "fraction": 0.1, **held_out}

    def _model(self, recipe: Recipe) -> Section:
        size, channels = self.start.shape or (self.photos.size, self.photos.channels)
        images: Section = {"image_size": size, "channels": channels}
        images["aspect_ratio"] = self.photos.aspect_ratio
        model = {**images, **recipe.model, **self.start.features(recipe)}
        if model["backbone"] == "scatter_linear":
            model["embedding_dim"] = 81 * channels * (int(str(model["image_size"])) // 4) ** 2
        return model | ({"classes": list(self.classes)} if recipe.classifies else {})

    def calibrated(self, settings: Settings) -> RunConfig:
        """Returns the configuration with the smallest noise for epsilon."""
        return calibrated(validate(settings), self.epsilon)


def shares_classes(photos: Photos) -> bool:
    """Returns whether users share classes."""
    return photos.source.columns.label is not None and photos.census.common_classes > 0


def embedding_recipe(goal: Goal) -> Recipe:
    """Returns the recipe for an embedding."""
    if not goal.start.imported:
        return recipes()["whole_net"]
    names = WHITENINGS if goal.start.standardised else PROJECTIONS
    for recipe in map(recipes().__getitem__, names[:-1]):
        config = goal.calibrated(goal.settings(recipe))
        if noise_on_mean(plan_mechanism(config)) <= recipe.most_noise:
            return recipe
    return recipes()[names[-1]]


def classifier_recipe(goal: Goal) -> Recipe:
    """Returns the recipe for a classifier."""
    if goal.start.imported:
        recipe = recipes()["imported_head"]
        config = goal.calibrated(goal.settings(recipe))
        plan = plan_mechanism(config)
        kept = head_directions(noise_on_mean(plan) / math.sqrt(plan.rounds))
        return recipe.model_copy(update={"principal_directions": kept})
    if goal.start.pretraining["kind"] == "supervised":
        return recipes()["pretrained_head"]
    return recipes()["scattering_head"]


def finished(goal: Goal, recipe: Recipe) -> Settings:
    """Returns settings with noise; the learning rate of a head follows from it."""
    settings = goal.settings(recipe)
    config = goal.calibrated(settings)
    plan = plan_mechanism(config)
    settings["mechanism"]["noise_multiplier"] = plan.noise_multiplier
    found = training_noise(config, plan)
    if found is not None and found[0] == "head":
        rate = head_learning_rate(found[1], recipe)
        settings["training"]["server"]["learning_rate"] = rate
        say(f"learning rate for this noise: {rate:g}")
    return settings


def policy_id(stem: str) -> str:
    """Returns a valid policy name made from the name of a file or folder."""
    name = re.sub(r"[^a-z0-9._-]+", "-", stem.lower())[:50].strip("._-") or "mine"
    return f"{name}-photos" if name in PRIVATE_FOLDERS else name


def customary_delta(bound: int) -> float:
    """Returns users ** -1.1 or 1e-5, whichever is smaller, rounded down to one digit.

    A larger delta would need a waiver.
    """
    delta = min(1e-5, bound**-1.1)
    power = 10.0 ** math.floor(math.log10(delta))
    return float(f"{math.floor(delta / power) * power:.0e}")


def forecast_text(config: RunConfig) -> list[str]:
    """Returns lines about the noise of a configuration, and warnings."""
    plan, found = plan_mechanism(config), warnings(config)
    noise = f"{participants(plan)}; noise on the mean: {noise_on_mean(plan):.2g} clipping norms"
    lines = [noise, f"forecast: {forecast(config)}"]
    lines += [f"warning: {text}" for text in found.values()]
    epsilon = config.policy.epsilon_cap
    if epsilon > PROTECTS_UP_TO:
        lines.append(
            f"warning: epsilon {epsilon:g} protects no user, and the policy's cap is permanent. "
            "Use 1 to 8."
        )
    return lines


_COMMENTS = {
    "purpose": "simulation: charges no budget, releases nothing. For a release, set `release`, and "
    "set `tuning` to declare how the settings were chosen.",
    "partition": "virtual_clients: number of groups of users, from the public lower bound.",
    "pretraining": "For public images, set licence and provenance, e.g. licence: cc-by-4.0.",
    "mechanism": "noise_multiplier: smallest value for policy.epsilon_cap. Another epsilon: "
    "fedemb plan --config FILE --target-epsilon E prints its value.",
    "policy": "Privacy budget of these users. The first run with a --policy folder fixes it, also "
    "a simulation: use a separate folder for tests. users_lower_bound: a number you can always "
    "promise. Budgets of two policies on the same users add up.",
}


def as_text(settings: Settings, output: Path) -> str:
    """Returns the settings as YAML with comments."""
    parts = ["# Written by `fedemb init`. `fedemb config SECTION` explains each setting.\n"]
    for name, value in settings.items():
        if name in _COMMENTS and (name, settings["task"]) != ("partition", "classification"):
            text = textwrap.wrap(_COMMENTS[name].replace("FILE", output.name), 96)
            parts += [f"# {line}\n" for line in text]
        parts.append(yaml.safe_dump({name: value}, sort_keys=False))
    return "".join(parts)
