"""What `fedemb init --task classification` writes in the place of settings for embeddings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fedemb.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fedemb.config import SourceConfig

_SHOWN = 20
"""Folders whose names are printed, at most."""


def source_of_classes(source: SourceConfig) -> tuple[SourceConfig, list[str]]:
    """The source with shared classes; and its folders, where each of them is one class.

    Folders of photos without folders inside are classes, and nobody's: each image is a unit.

    Raises:
      ConfigError: nothing tells the class of a photo.
      StorageError: the folder cannot be read.
    """
    from fedemb.data.source_files import is_side_file
    from fedemb.data.sources import find_parts, split_part

    columns, folders = source.columns, list[str]()
    if columns.label is None and source.file_format == "image_folder":
        columns = columns.model_copy(update={"user_id": None, "label": "label"})
        pieces = (piece for part in find_parts(source, []) for piece in split_part(part))
        named = {name for piece in pieces for name in piece.folders}
        folders = sorted(name for name in named if not is_side_file(f"{name}/photo"))
    if columns.label is None:
        raise ConfigError(
            "--task is classification, and no column names the class of a photo; name it with "
            "--column label=NAME"
        )
    return source.model_copy(update={"label_scope": "global", "columns": columns}), folders


def listed(folders: Sequence[str]) -> str:
    """The folders, for their owner to choose the classes from."""
    more = f" and {len(folders) - _SHOWN:,} more" if len(folders) > _SHOWN else ""
    return f"each folder is taken for a class: {', '.join(folders[:_SHOWN])}{more}"


def as_classifier(tree: dict[str, Any], source: SourceConfig, classes: str) -> dict[str, Any]:
    """The tree of an embedding's configuration turned into that of a classifier.

    Args:
      tree: as `fedemb init` makes it; its policy and public start stay.
      source: as `source_of_classes` returns it.
      classes: a public list, a,b,c.
    """
    policy = tree["policy"]
    bound, alone = policy["users_lower_bound"], source.columns.user_id is None
    start = tree["pretraining"]["kind"]
    # Features of a public start are computed once, so all units in each round cost little.
    from fedemb.privacy.mechanisms.registry import PoissonGaussian

    head = start == "supervised"
    chance = 1.0 if head else 0.1
    model = {key: tree["model"][key] for key in ("image_size", "channels", "aspect_ratio")}
    if start == "import":
        model |= {key: tree["model"][key] for key in ("backbone", "embedding_dim", "trainable")}
    else:
        model |= {"backbone": "resnet8_ws", "projection": False, "embedding_dim": 64}
        model["trainable"] = "head" if head else "all"
    described = source.model_dump(mode="json", exclude_defaults=True)
    described["label_scope"] = "global"
    return {
        "purpose": tree["purpose"],
        "task": "classification",
        "data": {"source": described},
        "partition": {
            "virtual_clients": 1,
            "max_images_per_user": 1 if alone else 64,
            "evaluation": {"by": "hash", "fraction": 0.1},
        },
        "model": {**model, "classes": [name.strip() for name in classes.split(",")]},
        "pretraining": tree["pretraining"],
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
            "unit_gradient": {"images_per_unit": 1 if alone else 4, "microbatch": min(64, bound)},
            "server": {
                "learning_rate": 40.0 if head else 2.0,
                "momentum": 0.9 if head else 0.0,
                "schedule": "linear" if head else "cosine",
                "rescale_to_unit_norm": True,
                "ema_decay": 0.9,
            },
        },
        "policy": {**policy, "unit": "image" if alone else "user"},
    }
