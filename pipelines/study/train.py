"""One row of the study: data to recall, by the project's own engine and mechanism.

The rounds are those of `train_dp_fedemb` (sampler, local training, clip, exact sum, noise, server
step), fed from arrays instead of a user store and without the ledger: a study is a simulation,
releases no model and may print what it saw.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from fedemb.config import RunConfig, SourceConfig
from fedemb.data.sources import read_public_images
from fedemb.documents.artifacts import json_digest, write_bytes
from fedemb.embedding import (
    ClientExamples,
    RoundFunction,
    assign_weights,
    build_backbone,
    configure_threads,
    embed,
    initial_state,
    released_weights,
    server_step,
    train_centralized,
    trainable_variables,
)
from fedemb.embedding.backbones import with_bfloat16
from fedemb.pipelines.study.protocol import Split
from fedemb.pipelines.study.rows import Row
from fedemb.privacy.mechanisms.mechanism import MechanismPlan, plan_mechanism
from fedemb.privacy.planning.extrapolation import at_equal_utility
from fedemb.provenance import code_digest
from fedemb.steps.evaluate_embeddings.measure import Subjects, measure, rate_name

LIBRARIES = ("tensorflow", "keras", "numpy", "dp-accounting", "tensorflow-privacy")
LAST_ROUNDS = 10
"""Rounds whose norms and clipping a row reports."""


@dataclass(frozen=True)
class Images:
    """Images of one part, sorted by identity. Raw."""

    images: np.ndarray
    """uint8 `[images, size, size, channels]`."""
    labels: np.ndarray
    """int64 `[images]`, 0 .. identities - 1, ascending."""

    @property
    def identities(self) -> int:
        """Number of identities."""
        return int(self.labels[-1]) + 1


@dataclass(frozen=True)
class Grouping:
    """Users spread over virtual clients at random, as the keyed hash of `partition_users` does.

    Implements `privacy.sampling.Index`.
    """

    user_count: int
    virtual_clients: int
    groupings: int
    seed: int
    _groups: np.ndarray = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Draws a virtual client for each user and grouping."""
        random = np.random.default_rng(np.random.SeedSequence([self.seed, self.user_count]))
        shape = (self.groupings, self.user_count)
        object.__setattr__(self, "_groups", random.integers(0, self.virtual_clients, shape))

    @property
    def user_keys(self) -> np.ndarray:
        """One number per user, uint64 `[users]`."""
        return np.arange(self.user_count, dtype=np.uint64)

    def members(self, grouping: int, group: int) -> np.ndarray:
        """Rows of a virtual client's users, `[members]`."""
        return np.flatnonzero(self._groups[grouping] == group)


def load_part(source: SourceConfig, names: tuple[str, ...], column: str, size: int) -> Images:
    """Reads the images whose column has one of the names; grey."""
    return _load(source.model_copy(update={"where": {column: names}}).model_dump_json(), size)


@lru_cache(maxsize=6)
def _load(source: str, size: int) -> Images:
    images, labels = read_public_images(SourceConfig.model_validate_json(source), size, 1)
    order = np.argsort(labels, kind="stable")
    return Images(images[order], labels[order])


def public_backbone(config: RunConfig, public: Images, cache: Path) -> Any:
    """The public start of a row; trained once per recipe and seed, then read from the cache."""
    from fedemb.embedding.central import train_contrastive, train_supervised

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
    schedule = recipe.model_dump(include={"epochs", "batch_size", "learning_rate", "momentum"})
    common = {"augmentation": recipe.augmentation, "seed": seed, **schedule}
    if recipe.kind == "supervised":
        train_supervised(backbone, public.images, public.labels, loss=recipe.loss, **common)
    else:
        train_contrastive(backbone, public.images, temperature=recipe.temperature, **common)
    weights = np.concatenate([v.numpy().ravel() for v in backbone.trainable_variables])
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, _npy(weights))
    return backbone


def _npy(array: np.ndarray) -> bytes:
    import io

    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def mechanism_plan(config: RunConfig, noise: float) -> MechanismPlan:
    """The plan of a row, with its noise set to `noise` on the mean.

    Equal noise, for correlated noise, means: the running sum of updates is as noisy as with
    independent noise, root mean square over rounds (`extrapolation.at_equal_utility`).
    """
    plan = plan_mechanism(config)
    return at_equal_utility(plan, noise * plan.normaliser) if plan.private else plan


def train_rounds(config: RunConfig, noise: float, backbone: Any, users: Images) -> dict[str, float]:
    """Trains a backbone in place by rounds; returns what the last rounds looked like."""
    from fedemb.privacy.queries import build_mechanism

    training = config.training
    plan = mechanism_plan(config, noise)
    # A fresh key each time: repeats differ in coins and noise as real runs do.
    mechanism = build_mechanism(plan, secrets.token_bytes(32), "study", 1, json_digest({}))
    index = Grouping(users.identities, plan.virtual_clients, plan.groupings, training.seed)
    trained = with_bfloat16(backbone) if training.mixed_precision else backbone
    shared = users.identities if training.algorithm == "dp_fedavg" else 0
    function = RoundFunction(
        trained,
        mechanism,
        training.local,
        variables=trainable_variables(trained, config.model.trainable),
        seed=training.seed,
        shared_head_rows=shared,
    )
    state = initial_state(training.server, function.initial_weights())
    last: list[np.ndarray] = []
    for round_index in range(plan.rounds):
        clients = []
        for client in mechanism.sample_clients(round_index, index):
            rows = np.flatnonzero(np.isin(users.labels, client.users))
            images, labels = users.images[rows], users.labels[rows]
            clients.append(ClientExamples(client.grouping, client.group, images, labels))
        sums = function(state.weights, clients, round_index)
        output = mechanism.aggregate(round_index, sums.sample_state)
        state = server_step(training.server, state, output.mean, rounds=plan.rounds)
        last.append(sums.clients)
    variables = trainable_variables(backbone, config.model.trainable)
    assign_weights(variables, released_weights(training.server, state))
    rows = np.concatenate(last[-LAST_ROUNDS:])
    empty = not len(rows)
    return {
        "norm": 0.0 if empty else float(np.median(rows[:, 0])),
        "clipped": 0.0 if empty else float((rows[:, 0] > plan.l2_norm_clip).mean()),
        "loss": 0.0 if empty else float(rows[:, 2].mean()),
        "examples": float(sum(part[:, 3].sum() for part in last)) * training.local.epochs,
        "dimensions": float(function.dim),
    }


def run_row(row: Row, base: RunConfig, split: Split, column: str, cache: Path) -> dict[str, Any]:
    """Trains and measures one row.

    Args:
      row: method, noise, seed and settings.
      base: data, model and public start; the row's settings go on top.
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
        if row.method == "centralized":
            epochs = config.evaluation.centralized_epochs
            train_centralized(backbone, users.images, users.labels, config.training, epochs=epochs)
        elif row.method != "public_only":
            seen = train_rounds(config, row.noise, backbone, users)
    held_out = load_part(source, split.evaluation, column, size)
    owners = held_out.labels.astype(np.uint64)
    subjects = Subjects(held_out.labels, owners, np.full(len(owners), ""))
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
