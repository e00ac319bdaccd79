"""One row of the study: data to recall, the rounds by `fedemb.Simulation`."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from fedemb.config import RunConfig, SourceConfig
from fedemb.data.photos import PhotoReader
from fedemb.data.sources import read_public_images
from fedemb.engine import (
    Round,
    assign_weights,
    build_backbone,
    configure_threads,
    embed,
    pretrain,
    train_centralized,
)
from fedemb.evaluation.held_out import Subjects, measure, rate_name
from fedemb.foundation.canonical_json import json_digest
from fedemb.foundation.files import write_bytes
from fedemb.privacy.registry import plan_mechanism
from fedemb.runtime.provenance import code_digest
from fedemb.training.simulation import Simulation
from studies.cohort import at_equal_utility
from studies.utility.protocol import Split
from studies.utility.rows import CENTRALIZED, Row

LIBRARIES = ("tensorflow", "keras", "numpy", "dp-accounting")
LAST_ROUNDS = 10
"""Rounds whose norms and clipping a row reports."""


@dataclass(frozen=True)
class Images:
    """Images of one part, sorted by group and identity. Raw."""

    images: np.ndarray
    """uint8 `[images, size, size, channels]`."""
    labels: np.ndarray
    """int64 `[images]`, 0 .. identities - 1, ascending."""
    groups: np.ndarray
    """str `[images]`: value of the column that divides, an identity is in one."""

    @property
    def identities(self) -> int:
        """Number of identities."""
        return int(self.labels[-1]) + 1


def load_part(source: SourceConfig, names: tuple[str, ...], column: str, size: int) -> Images:
    """Reads the images whose column has one of the names; grey."""
    images, labels, first = [], [], 0
    for name in names:
        group = source.model_copy(update={"where": {column: (name,)}}).model_dump_json()
        pixels, classes = _load(group, size)
        images.append(pixels)
        labels.append(classes + first)
        first = int(labels[-1].max()) + 1
    sizes = [len(part) for part in images]
    return Images(np.concatenate(images), np.concatenate(labels), np.repeat(names, sizes))


@lru_cache(maxsize=64)
def _load(source: str, size: int) -> tuple[np.ndarray, np.ndarray]:
    images, labels = read_public_images(
        SourceConfig.model_validate_json(source), PhotoReader(size, channels=1)
    )
    order = np.argsort(labels, kind="stable")
    return images[order], labels[order]


def public_backbone(config: RunConfig, public: Images, cache: Path) -> Any:
    """The public backbone of a row; trained once per recipe and seed, then read from the cache."""
    recipe, seed = config.pretraining, config.training.seed
    backbone = build_backbone(config.model, seed)
    if recipe.kind == "none":
        return backbone
    key = {
        "model": config.model.model_dump(mode="json", exclude={"trainable"}),
        "pretraining": recipe.model_dump(mode="json", exclude={"source"}),
        "seed": seed,
        "images": [len(public.images), int(public.images.sum(dtype=np.int64))],
    }
    path = cache / "public" / f"{json_digest(key)[:16]}.npy"
    if path.exists():
        assign_weights(backbone.trainable_variables, np.load(path))
        return backbone
    pretrain(backbone, public.images, public.labels, recipe, seed=seed)
    weights = np.concatenate([v.numpy().ravel() for v in backbone.trainable_variables])
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, _npy(weights))
    return backbone


def _npy(array: np.ndarray) -> bytes:
    import io

    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def with_noise(config: RunConfig, noise: float) -> RunConfig:
    """The configuration with noise of `noise` x clip on the mean; as it is without privacy.

    Equal noise, for correlated noise, means: the running sum of updates is as noisy as with
    independent noise, root mean square over rounds (`studies.cohort.at_equal_utility`).
    """
    plan = plan_mechanism(config)
    if not plan.private:
        return config
    equal = at_equal_utility(plan, noise * plan.normalizer).noise_multiplier
    return config.updated({"mechanism.noise_multiplier": equal})


def train_rounds(
    config: RunConfig, noise: float, start: Any, users: Images
) -> tuple[Any, dict[str, float]]:
    """Trains by rounds from a public backbone; returns the model, and how the last rounds looked.

    Coins and noise come from a fresh key: repeats differ in them as real runs do.
    """
    settings = with_noise(config, noise).updated({"training.parallel_clients": 1})
    rounds: list[Round[None]] = []
    result = Simulation.of(settings).train(
        users.images, users.labels, users.labels, start=start, on_round=rounds.append
    )
    rows = np.concatenate([done.sums.clients for done in rounds[-LAST_ROUNDS:]])
    empty = not len(rows)
    examples = sum(float(done.sums.clients[:, 3].sum()) for done in rounds)
    return result.model, {
        "norm": 0.0 if empty else float(np.median(rows[:, 0])),
        "clipped": 0.0 if empty else float((rows[:, 0] > result.plan.l2_norm_clip).mean()),
        "loss": 0.0 if empty else float(rows[:, 2].mean()),
        "examples": examples * config.training.local.epochs,
        "dimensions": float(rounds[-1].state.weights.size),
    }


def run_row(row: Row, base: RunConfig, split: Split, column: str, cache: Path) -> dict[str, Any]:
    """Trains and measures one row.

    Args:
      row: method, noise, seed and settings.
      base: data, model and public backbone; the settings of the row override it.
      split: who pretrains, trains and is evaluated.
      column: what the split divides.
      cache: folder of public backbones.

    Returns:
      Recall per false accept rate, nearest neighbour accuracy, bootstrap draws of the first rate,
      what the last rounds looked like, seconds, code and library versions.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    configure_threads(1)
    started = time.monotonic()
    size, source = base.model.image_size, base.data.source
    users = load_part(source, split.train, column, size)
    config = row.config(base, users.identities)
    seen: Mapping[str, float] = {}
    if row.method == "untrained":
        backbone = build_backbone(config.model, config.training.seed)
    else:
        public = load_part(source, split.public, column, size)
        backbone = public_backbone(config, public, cache)
        if row.method in CENTRALIZED:
            train_centralized(
                backbone,
                users.images,
                users.labels,
                config.training,
                epochs=config.evaluation.centralized_epochs,
                learning_rate=row.learning_rate,
            )
        elif row.method != "public_only":
            backbone, seen = train_rounds(config, row.noise, backbone, users)
    held_out = load_part(source, split.evaluation, column, size)
    owners = held_out.labels.astype(np.uint64)
    subjects = Subjects(held_out.labels, owners, held_out.groups)
    measured = measure(subjects, embed(backbone, held_out.images), config.evaluation)
    rates, recall = measured.verification.false_accept_rates, measured.verification.recall
    return {
        "recall": {rate_name(f): round(e.value, 6) for f, e in zip(rates, recall, strict=True)},
        "nearest_neighbour": round(measured.retrieval.nearest_neighbour.value, 6),
        "draws": [round(float(draw), 6) for draw in recall[0].draws],
        "people": {"train": users.identities, "evaluation": held_out.identities},
        "last_rounds": dict(seen),
        "seconds": round(time.monotonic() - started, 1),
        "code_sha": code_digest(),
        "versions": {name: importlib.metadata.version(name) for name in LIBRARIES}
        | {"python": platform.python_version()},
    }
