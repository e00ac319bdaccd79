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
from fedemb.pipelines.cli.init.backbone import Backbone
from fedemb.pipelines.cli.init.photos import Photos
from fedemb.pipelines.cli.init.recipes import (
    PROJECTIONS,
    WHITENING,
    WHOLE_NET,
    EmbeddingRecipe,
    Section,
    Training,
)
from fedemb.pipelines.cli.planning.plan_text import PROTECTS_UP_TO
from fedemb.pipelines.cli.planning.planned import calibrated
from fedemb.pipelines.run.load_config import validate
from fedemb.privacy.mechanisms.registry import Covariance, GroupPoissonGaussian, plan_mechanism
from fedemb.reports.mechanism_text import participants
from fedemb.steps.plan_privacy.noise_limits import noise_on_mean
from fedemb.steps.plan_privacy.plan import warnings


class Settings(TypedDict):
    """Sections of a configuration, as they are written."""

    purpose: str
    task: NotRequired[str]
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
class Promise:
    """Public numbers of the guarantee.

    Attributes:
      users_lower_bound: public lower bound on the number of units of privacy.
      epsilon: epsilon of one run, and the cap of the policy.
    """

    users_lower_bound: int
    epsilon: float


def shares_classes(photos: Photos) -> bool:
    """Returns whether users share classes."""
    return photos.source.columns.label is not None and photos.census.common_classes > 0


def images_section(photos: Photos, start: Backbone) -> dict[str, object]:
    """Returns the settings of the model's input."""
    size, channels = start.image_shape(photos)
    return {"image_size": size, "channels": channels, "aspect_ratio": photos.aspect_ratio}


def embedding_settings(
    photos: Photos,
    start: Backbone,
    promise: Promise,
    recipe: EmbeddingRecipe,
    held_out_classes: Sequence[str] = (),
) -> Settings:
    """Returns the settings of an embedding; a share of `held_out_classes` or of all is held out."""
    clients = max(1, round(0.9 * promise.users_lower_bound / recipe.users_per_client))
    described = photos.source.model_dump(mode="json", exclude_defaults=True)
    described["label_scope"] = "global" if shares_classes(photos) else "user"
    evaluation: dict[str, object] = {"by": "hash", "fraction": 0.1}
    if held_out_classes:
        evaluation["classes"] = list(held_out_classes)
    return {
        "purpose": "simulation",
        "data": {"source": described},
        "partition": {"virtual_clients": clients, "evaluation": evaluation},
        "model": {
            **recipe.model,
            **(start.whitened() if recipe.solved else start.projected()),
            **images_section(photos, start),
        },
        "pretraining": start.pretraining,
        "mechanism": _mechanism(recipe, promise, clients),
        "training": recipe.training,
        "policy": policy_section(photos, promise),
    }


def _mechanism(recipe: EmbeddingRecipe, promise: Promise, clients: int) -> dict[str, object]:
    if recipe.solved:
        units = max(1, round(0.9 * promise.users_lower_bound))
        return {"kind": Covariance.kind_name(), "units_per_round": units, "noise_multiplier": 1.0}
    probability = max(recipe.sampling_probability, _LEAST_CLIENTS / clients)
    return {
        "kind": GroupPoissonGaussian.kind_name(),
        "rounds": recipe.rounds,
        "sampling_probability": round(min(1.0, probability), 3),
        "noise_multiplier": 1.0,
    }


def recipe_of(photos: Photos, start: Backbone, promise: Promise) -> EmbeddingRecipe:
    """Returns the recipe for an embedding: see `recipes`."""
    if not start.imported:
        return WHOLE_NET
    if start.whitened():
        return WHITENING
    for recipe in PROJECTIONS[:-1]:
        settings = embedding_settings(photos, start, promise, recipe)
        config = calibrated(validate(settings), promise.epsilon)
        if noise_on_mean(plan_mechanism(config)) <= recipe.most_noise:
            return recipe
    return PROJECTIONS[-1]


def policy_section(photos: Photos, promise: Promise) -> dict[str, object]:
    """Returns the section `policy`."""
    bound = promise.users_lower_bound
    return {
        "policy_id": policy_id(Path(photos.source.uri).stem),
        "users_lower_bound": bound,
        "delta": customary_delta(bound),
        "composition": "planned",
        "epsilon_cap": promise.epsilon,
    }


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
    parts = ["# Written by `fedemb init`. `fedemb config describe` explains each setting.\n"]
    for name, value in settings.items():
        if name in _COMMENTS and (name, settings.get("task")) != ("partition", "classification"):
            text = textwrap.wrap(_COMMENTS[name].replace("FILE", output.name), 96)
            parts += [f"# {line}\n" for line in text]
        parts.append(yaml.safe_dump({name: value}, sort_keys=False))
    return "".join(parts)
