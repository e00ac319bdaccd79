"""Trains private projections on frozen features of car photos with the engine of a run.

    python -m studies.photos.projections lite0.keras FOLDER --cache CACHE

FOLDER has `cars140_160.parquet` and `grocery_96.parquet`. All groups take part in every round; the
noise on the mean is a share of the clip, as for many users. `--validate` holds out 19 of the 98
training classes; without it, the 42 test classes are measured.
"""

from __future__ import annotations

import argparse
import secrets
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np

from fedemb.config import EvaluationConfig, RunConfig
from fedemb.data.photos import PhotoReader
from fedemb.data.sources import read_public_images, read_some_public_images
from fedemb.engine.feature_cache import MicroBatches
from fedemb.engine.rounds import ClientExamples, Feed, assign_weights, run_rounds
from fedemb.engine.server import initial_state, released_weights
from fedemb.engine.tensorflow_clients import RoundFunction
from fedemb.evaluation import held_out as m
from fedemb.evaluation.held_out import Subjects
from fedemb.models.backbones import cut
from fedemb.models.imported import import_backbone
from fedemb.models.losses import unit_rows
from fedemb.models.public_features import fit_features
from fedemb.pipelines.run.load_config import load_config
from fedemb.privacy.registry import MECHANISMS
from fedemb.privacy.running import build_mechanism

VALIDATION = 19
Photos = dict[str, tuple[np.ndarray, np.ndarray]]
"""Features and classes of `train` and `test`."""


def features(config: RunConfig, cache: Path) -> tuple[Photos, Any]:
    """Returns the features of all photos, and the projection as a model of features."""
    model, start = config.model, config.pretraining
    reader, backbone = PhotoReader.of(model), import_backbone(Path(start.import_path or ""), model)
    trunk, tip = cut(backbone, "projection")
    files = {name: cache / f"cars-{name}.npz" for name in ("train", "test")}
    if not all(path.exists() for path in files.values()):
        assert start.source is not None
        fit_features(backbone, read_some_public_images(start.source, reader, 5000, 0))
        net = MicroBatches(trunk)
        for name, path in files.items():
            source = config.data.source.model_copy(update={"where": {"split": (name,)}})
            images, classes = read_public_images(source, reader)
            np.savez(path, features=net(images), classes=classes)
    found: Photos = {}
    for name, path in files.items():
        with np.load(path) as photos:
            found[name] = photos["features"], photos["classes"]
    return found, tip


@dataclass(frozen=True)
class Groups:
    """Users in groups of one size: a `sampling.Index` of classes, each one a user."""

    classes: np.ndarray
    """Classes in random order."""
    virtual_clients: int
    groupings: int = 1

    @property
    def user_count(self) -> int:
        """Number of users."""
        return len(self.classes)

    @cached_property
    def user_keys(self) -> np.ndarray:
        """Names of users, ascending."""
        return np.arange(self.user_count, dtype=np.uint64)

    def members(self, grouping: int, group: int) -> np.ndarray:
        """Returns the rows of a group's users."""
        del grouping
        return np.arange(group, self.user_count, self.virtual_clients)


def train(
    tip: Any, photos: tuple[np.ndarray, np.ndarray], config: RunConfig, *, noise: float, seed: int
) -> float:
    """Trains a projection in place; returns the largest norm of an update of the first round."""
    training, section = config.training, config.mechanism
    groups = config.partition.virtual_clients
    settings: dict[str, Any] = {
        "rounds": section.rounds,
        "l2_norm_clip": section.l2_norm_clip,
        "virtual_clients": groups,
        "groupings": 1,
        "sampling_probability": 1.0,
        "noise_multiplier": noise * groups,
    }
    plan = MECHANISMS["group_poisson_gaussian"](**settings)
    key = secrets.token_bytes(32)
    order = np.random.default_rng(seed).permutation(np.unique(photos[1]))
    people = Groups(order, groups)
    mechanism = build_mechanism(plan, key, "study", 1, "0" * 64)

    def load(client: Any) -> ClientExamples:
        mine = np.isin(photos[1], people.classes[client.users])
        return ClientExamples(client.grouping, client.group, photos[0][mine], photos[1][mine])

    function = RoundFunction(tip, mechanism, training.local, seed=seed)
    state, norms = initial_state(function.initial_weights()), []
    with Feed(function, mechanism, first=0, index=cast("Any", people), load=load) as feed:
        for done in run_rounds(function, mechanism, training.server, state, feed):
            state = done.state
            norms.append(float(done.sums.clients[:, 0].max()))
    assign_weights(tip.trainable_variables, released_weights(training.server, state))
    return norms[0]


def joined(tip: Any, found: np.ndarray, weight: float) -> np.ndarray:
    """Returns embeddings of length 1: the projection, then the features of a length."""
    private = np.asarray(unit_rows(tip(found)))
    return np.asarray(unit_rows(np.concatenate([private, weight * found], axis=1)))


def main() -> None:
    """Measures the frozen features and projections at several noises."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("backbone", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--noise", type=float, nargs="+", default=[0.01, 0.03])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--weight", type=float, nargs="+", default=[1.0])
    parser.add_argument("--validate", action="store_true")
    parser.add_argument("--set", nargs="*", default=[])
    options = parser.parse_args()
    options.cache.mkdir(parents=True, exist_ok=True)
    sources = {
        "data.source.uri": options.folder / "cars140_160.parquet",
        "pretraining.source.uri": options.folder / "grocery_96.parquet",
        "pretraining.import_path": options.backbone,
    }
    settings = [f"{name}={path}" for name, path in sources.items()]
    config = load_config("cars_projection", [*settings, *options.set])
    photos, tip = features(config, options.cache)
    ours, theirs = photos["train"], photos["test"]
    if options.validate:
        held = np.isin(ours[1], np.random.default_rng(0).permutation(98)[:VALIDATION])
        theirs = ours[0][held], ours[1][held]
        ours = ours[0][~held], ours[1][~held]
    users = theirs[1].astype(np.uint64)
    subjects = Subjects(theirs[1], users, np.full(len(users), ""))
    how = EvaluationConfig(false_accept_rates=(1e-3, 1e-2))
    start = m.measure(subjects, theirs[0], how)
    print_row("features", start, start)
    before = tip.get_weights()
    for noise in options.noise:
        for seed in range(options.runs):
            tip.set_weights(before)
            norm = train(tip, ours, config, noise=noise, seed=seed)
            for weight in options.weight:
                found = m.measure(subjects, joined(tip, theirs[0], weight), how)
                print_row(
                    f"noise {noise:g}, weight {weight:g}, first norm {norm:.2f}", found, start
                )


def print_row(name: str, found: m.Measured, start: m.Measured) -> None:
    """Prints a row of the table: recall and nearest neighbour, with gains over the start."""
    recalls = " / ".join(f"{one.value:.3f}" for one in found.verification.recall)
    nearest = found.retrieval.nearest_neighbour
    gains = [
        a - b for a, b in zip(found.verification.recall, start.verification.recall, strict=True)
    ]
    gains.append(nearest - start.retrieval.nearest_neighbour)
    shown = " / ".join(f"{g.value:+.3f} [{g.low:+.3f}, {g.high:+.3f}]" for g in gains)
    sys.stdout.write(f"| {name} | {recalls} / {nearest.value:.3f} | {shown} |\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
