"""Settings that `fedemb init` writes, and what to expect from them."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NotRequired, TypedDict

import yaml

from fedemb.config import RunConfig
from fedemb.config.policy import PRIVATE_FOLDERS
from fedemb.gate.plan import (
    noise_on_mean,
    temperature_for_noise,
    training_noise,
    warnings,
)
from fedemb.pipelines.cli.init.backbone import Backbone
from fedemb.pipelines.cli.init.photos import Photos
from fedemb.pipelines.cli.init.recipes import (
    FROM_SCRATCH,
    PROJECTIONS,
    SOLVED_FROM_NOISE,
    Recipe,
    Section,
    head_learning_rate,
    recipes,
)
from fedemb.pipelines.cli.planning.plan_text import PROTECTS_UP_TO
from fedemb.pipelines.cli.planning.planned import calibrated
from fedemb.pipelines.output import say
from fedemb.pipelines.run.load_config import validate
from fedemb.privacy.mechanisms.registry import plan_mechanism
from fedemb.reports.privacy_words import participants


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
    if goal.start.standardised:
        return recipes()["whitening"]
    for recipe in map(recipes().__getitem__, PROJECTIONS[:-1]):
        config = goal.calibrated(goal.settings(recipe))
        if noise_on_mean(plan_mechanism(config)) <= recipe.most_noise:
            return recipe
    return recipes()[PROJECTIONS[-1]]


def classifier_recipe(goal: Goal) -> Recipe:
    """Returns the recipe for a classifier."""
    if goal.start.imported:
        recipe = recipes()["imported_head"]
        config = goal.calibrated(goal.settings(recipe))
        found = training_noise(config, plan_mechanism(config))
        few = found is not None and found[1] >= SOLVED_FROM_NOISE and goal.start.standardised
        return recipes()["solved_head"] if few else recipe
    if goal.start.pretraining["kind"] == "supervised":
        return recipes()["pretrained_head"]
    whole = goal.users_lower_bound >= FROM_SCRATCH
    return recipes()["whole_classifier" if whole else "scattering_head"]


def finished(goal: Goal, recipe: Recipe) -> Settings:
    """Returns settings with noise; learning rate and temperature of a head follow from it."""
    settings = goal.settings(recipe)
    config = goal.calibrated(settings)
    plan = plan_mechanism(config)
    settings["mechanism"]["noise_multiplier"] = plan.noise_multiplier
    found = training_noise(config, plan)
    if found is not None and found[0] == "head":
        rate = head_learning_rate(found[1], recipe)
        changed = config.updated({"training.server.learning_rate": rate})
        divisor = temperature_for_noise(changed, plan)
        temperature = 1.0 if divisor is None else float(f"{divisor:.3g}")
        settings["training"]["server"]["learning_rate"] = rate
        settings["model"]["temperature"] = temperature
        say(
            f"learning rate for this noise: {rate:g}",
            f"temperature for this noise: {temperature:g}",
        )
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


def outlook(config: RunConfig) -> list[str]:
    """Returns lines about the noise of a configuration, and warnings."""
    plan, found = plan_mechanism(config), warnings(config)
    noise = f"{participants(plan)}; noise on the mean: {noise_on_mean(plan):.2g} clipping norms"
    lines = [noise, *(f"warning: {text}" for text in found.values())]
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
    "mechanism": "noise_multiplier: smallest value for policy.epsilon_cap. For another epsilon: "
    "fedemb plan --target-epsilon E --config FILE --write FILE",
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
