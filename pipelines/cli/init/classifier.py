"""Settings that `fedemb init --task classification` writes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fedemb.errors import ConfigError

if TYPE_CHECKING:
    from fedemb.pipelines.cli.init.backbone import Backbone
    from fedemb.pipelines.cli.init.photos import Photos
    from fedemb.pipelines.cli.init.settings import Promise, Settings
    from fedemb.steps.partition_users.census import Census

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
    """Returns the settings of a classifier.

    Args:
      photos: the photos.
      start: the public backbone.
      promise: public numbers of the guarantee.
      classes: public list of classes.
    """
    from fedemb.pipelines.cli.init.settings import policy_section
    from fedemb.privacy.mechanisms.registry import PoissonGaussian

    head = start.pretrained  # Features are computed once, so all units in each round cost little.
    chance = 1.0 if head else 0.1
    bound = promise.users_lower_bound
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
        "model": _model(photos, start, classes),
        "pretraining": start.pretraining,
        "mechanism": {
            "kind": PoissonGaussian.kind_name(),
            "rounds": 60 if head else 200,
            "sampling_probability": chance,
            "units_per_round": max(1, round(0.9 * bound * chance)),
            "noise_multiplier": 1.0,
            "l2_norm_clip": 0.1 if head else 1.0,
        },
        "training": {
            "algorithm": "dp_sgd",
            "unit_gradient": {
                "images_per_unit": 1 if photos.of_images else 4,
                "microbatch": min(64, bound),
            },
            "server": {
                "learning_rate": 40.0 if head else 2.0,
                "momentum": 0.9 if head else 0.0,
                "schedule": "linear" if head else "cosine",
                "rescale_to_unit_norm": True,
                "ema_decay": 0.9,
            },
        },
        "policy": {
            **policy_section(photos, promise),
            "unit": "image" if photos.of_images else "user",
        },
    }


def _model(photos: Photos, start: Backbone, classes: Sequence[str]) -> dict[str, object]:
    from fedemb.pipelines.cli.init.recipes import FROZEN_BACKBONE
    from fedemb.pipelines.cli.init.settings import images_section

    if start.imported:
        net = FROZEN_BACKBONE.model_section()
    else:
        net: dict[str, object] = {
            "backbone": "resnet8_ws",
            "projection": False,
            "embedding_dim": 64,
            "trainable": "head" if start.pretrained else "all",
        }
    return {**images_section(photos, start), **net, "classes": list(classes)}
