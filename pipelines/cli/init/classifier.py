"""Settings that `fedemb init --task classification` writes."""

from __future__ import annotations

from collections.abc import Sequence

from fedemb.config import RunConfig
from fedemb.errors import ConfigError
from fedemb.pipelines.cli.init import recipes
from fedemb.pipelines.cli.init.backbone import Backbone
from fedemb.pipelines.cli.init.photos import Photos
from fedemb.pipelines.cli.init.recipes import (
    SCATTERING_PIXELS,
    WHITENED_DIRECTIONS,
    ClassifierRecipe,
    head_learning_rate,
)
from fedemb.pipelines.cli.init.settings import Promise, Settings, images_section, policy_section
from fedemb.privacy.mechanisms.registry import LeastSquares, PoissonGaussian, plan_mechanism
from fedemb.steps.partition_users.census import Census
from fedemb.steps.plan_privacy.noise_limits import temperature_for_noise, training_noise

_LABELS_SHOWN = 50


def check_classes(classes: Sequence[str], census: Census) -> None:
    """Rejects a list of classes of which no photo has one.

    Raises:
      ConfigError: no class is a label of the photos.
    """
    if not census.labels or set(classes) & set(census.labels):
        return
    shown = ",".join(sorted(census.labels)[:_LABELS_SHOWN])
    spelled = {label.casefold(): label for label in census.labels}
    other = [spelled[name.casefold()] for name in classes if name.casefold() in spelled]
    hint = f"--classes {','.join(other)}" if other else "--classes with names from this list"
    raise ConfigError(
        f"No photo has one of the classes {', '.join(classes)}. The labels of the photos are "
        f"{shown}. Pass {hint}, if you may publish them."
    )


def classifier_settings(
    photos: Photos, start: Backbone, promise: Promise, classes: Sequence[str]
) -> Settings:
    """Returns the settings of a classifier."""
    bound = promise.users_lower_bound
    recipe = recipe_of(start, bound)
    described = photos.source.model_dump(mode="json", exclude_defaults=True)
    return {
        "purpose": "simulation",
        "task": "classification",
        "data": {"source": {**described, "label_scope": "global"}},
        "partition": {
            "virtual_clients": 1,
            "max_images_per_user": 1 if photos.of_images else 64,
            "evaluation": {"by": "hash", "fraction": 0.1},
        },
        "model": _model(photos, start, recipe, classes),
        "pretraining": start.pretraining,
        "mechanism": {
            "kind": PoissonGaussian.kind_name(),
            "rounds": recipe.rounds,
            "sampling_probability": recipe.chance,
            "units_per_round": max(1, round(0.9 * bound * recipe.chance)),
            "noise_multiplier": 1.0,
            "l2_norm_clip": recipe.clip,
        },
        "training": {
            "algorithm": "dp_sgd",
            "unit_gradient": {
                "images_per_unit": 1 if photos.of_images else 4,
                "microbatch": min(64, bound),
            },
            "server": {
                "learning_rate": recipe.learning_rate or recipe.most_learning_rate,
                "momentum": recipe.momentum,
                "schedule": recipe.schedule,
                "rescale_to_unit_norm": True,
                "ema_decay": 0.9,
            },
        },
        "policy": {
            **policy_section(photos, promise),
            "unit": "image" if photos.of_images else "user",
        },
    }


def with_solved_head(settings: Settings, config: RunConfig, start: Backbone) -> Settings:
    """Returns the settings with a head solved from one round, where the noise makes it better."""
    found = training_noise(config, plan_mechanism(config))
    constants = start.imported and start.card and start.constants("principal_directions")
    if not constants or found is None or found[1] < recipes.SOLVED_FROM_NOISE:
        return settings
    directions = min(recipes.SOLVED_DIRECTIONS, start.width)
    model = {**settings["model"], **constants}
    model |= {"principal_directions": directions, "embedding_dim": directions}
    del model["whitened_directions"]
    mechanism, training = settings["mechanism"], settings["training"]
    return {
        **settings,
        "model": model,
        "mechanism": {
            "kind": LeastSquares.kind_name(),
            "units_per_round": mechanism["units_per_round"],
            "noise_multiplier": 1.0,
        },
        "training": {
            "algorithm": "dp_sgd",
            "unit_gradient": training.get("unit_gradient", {}),
            "server": {"ridge": recipes.SOLVED_RIDGE},
        },
    }


def recipe_of(start: Backbone, bound: int) -> ClassifierRecipe:
    """Returns the recipe for a classifier and a public lower bound on the number of units."""
    if start.imported:
        return recipes.IMPORTED_HEAD
    whole = not start.pretrained and bound >= recipes.FROM_SCRATCH
    return recipes.ALL_LAYERS if whole else recipes.HEAD


def with_head_rates(
    settings: Settings, config: RunConfig, recipe: ClassifierRecipe
) -> dict[str, float]:
    """Sets learning rate and temperature of a head by the noise of its plan, in place.

    Returns:
      The two numbers by name; empty if more than a head is trained.
    """
    plan = plan_mechanism(config)
    found = training_noise(config, plan)
    if found is None or found[0] != "head":
        return {}
    rate = head_learning_rate(found[1], recipe)
    settings["training"].setdefault("server", {})["learning_rate"] = rate
    changed = config.updated({"training.server.learning_rate": rate})
    divisor = temperature_for_noise(changed, plan)
    temperature = 1.0 if divisor is None else float(f"{divisor:.3g}")
    settings["model"]["temperature"] = temperature
    return {"learning rate": rate, "temperature": temperature}


def _model(
    photos: Photos, start: Backbone, recipe: ClassifierRecipe, classes: Sequence[str]
) -> dict[str, object]:
    images = images_section(photos, start)
    net: dict[str, object] = {"backbone": "resnet8_ws", "projection": False, "embedding_dim": 64}
    net["trainable"] = "all" if recipe.chance < 1 else "head"
    if start.imported:
        net |= {"backbone": "imported", **start.features()}
    elif recipe.chance == 1 and not start.pretrained:
        side = SCATTERING_PIXELS
        images["image_size"] = side
        net |= {
            "backbone": "scatter_linear",
            "embedding_dim": 81 * start.image_shape(photos)[1] * (side // 4) ** 2,
            "whitened_directions": WHITENED_DIRECTIONS,
        }
    return {**images, **net, "classes": list(classes)}
