"""Trains private projections on frozen features of photos, with the engine of a run.

    python -m studies.photos covariance lite2.keras FOLDER --cache CACHE --data groceries
    python -m studies.photos projection lite2.keras FOLDER --cache CACHE

FOLDER has the Parquet files of `FEDEMB_DATA`. Features are computed once and kept in CACHE. No
ledger and no gate: nothing here can be released. Results: README.md.
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

from fedemb.config import EvaluationConfig, RunConfig, SourceConfig
from fedemb.data.photos import PhotoReader
from fedemb.data.sources import read_public_images
from fedemb.evaluation import held_out as m
from fedemb.evaluation.held_out import Subjects
from fedemb.models.backbones import cut
from fedemb.models.imported import import_backbone
from fedemb.models.losses import unit_rows
from fedemb.models.public_features import fit_features
from fedemb.pipelines.run.load_config import load_config
from fedemb.privacy.registry import MECHANISMS
from fedemb.privacy.running import build_mechanism
from fedemb.training.feature_cache import MicroBatches, plain_rows
from fedemb.training.heads import CovarianceFunction
from fedemb.training.rounds import ClientExamples, Feed, assign_weights, run_rounds
from fedemb.training.server import initial_state, released_weights
from fedemb.training.tensorflow_clients import RoundFunction

FILES = {"cars": "cars140_160.parquet", "groceries": "grocery_96.parquet"}
Photos = tuple[np.ndarray, np.ndarray]
"""Features and classes."""


def show(*cells: str) -> None:
    """Prints a row of a table."""
    sys.stdout.write(f"| {' | '.join(cells)} |\n")
    sys.stdout.flush()


@dataclass(frozen=True)
class Groups:
    """Users in memory, in groups of one size: a `sampling.Index`."""

    users: np.ndarray
    """Names of users; a row is a user's index here."""
    virtual_clients: int = 1
    groupings: int = 1

    @property
    def user_count(self) -> int:
        """Number of users."""
        return len(self.users)

    @cached_property
    def user_keys(self) -> np.ndarray:
        """Sampling keys of users, ascending."""
        return np.arange(self.user_count, dtype=np.uint64)

    def members(self, grouping: int, group: int) -> np.ndarray:
        """Returns the rows of a group's users."""
        del grouping
        return np.arange(group, self.user_count, self.virtual_clients)


def configured(options: argparse.Namespace) -> RunConfig:
    """Returns the preset; the photos of one kind are private, those of the other public."""
    (public,) = FILES.keys() - {options.data}
    settings = {
        "data.source.uri": options.folder / FILES[options.data],
        "pretraining.source.uri": options.folder / FILES[public],
        "pretraining.import_path": options.backbone,
    }
    if public == "cars":
        settings["pretraining.source.columns.label"] = "user_id"
    preset = {"covariance": "cars_whitening", "projection": "cars_projection"}[options.kind]
    return load_config(preset, [*(f"{k}={v}" for k, v in settings.items()), *options.set])


def photo_features(config: RunConfig, data: str, path: Path) -> tuple[Photos, Photos, Any]:
    """Returns the features of training and test classes, and the projection.

    The test classes are the 42 of cars, or a third of the groceries.
    """
    model, start = config.model, config.pretraining
    reader = PhotoReader(*model.photo)
    backbone = import_backbone(Path(start.import_path or ""), model)
    trunk, tip = cut(backbone, "projection")
    if not path.exists():
        assert start.source is not None
        fit_features(backbone, read_public_images(start.source, reader, 5000)[0])
        label = "user_id" if data == "cars" else "label"
        columns = {"user_id": None, "label": label}
        tree = {"uri": config.data.source.uri, "columns": columns, "label_scope": "global"}
        kept: dict[str, Any] = {}
        for part in ("train", "test"):
            where = {"split": (part,)} if data == "cars" else {}
            source = SourceConfig.model_validate({**tree, "where": where})
            images, names = read_public_images(source, reader)
            classes = np.unique(names, return_inverse=True)[1]
            if data != "cars":
                drawn = np.random.default_rng(0).permutation(np.unique(classes))[::3]
                mine = np.isin(classes, drawn) == (part == "test")
                images, classes = images[mine], classes[mine]
            kept |= {f"{part}_features": MicroBatches(trunk)(images), f"{part}_classes": classes}
        np.savez(path, **kept)
    with np.load(path) as found:
        ours, theirs = (
            (found[f"{part}_features"], found[f"{part}_classes"]) for part in ("train", "test")
        )
    return ours, theirs, tip


def train_projection(tip: Any, photos: Photos, config: RunConfig, noise: float, seed: int) -> None:
    """Trains or solves the projection in place, at a noise on the mean in clipping norms."""
    training, section = config.training, config.mechanism
    classes, solved = np.unique(photos[1]), section.kind == "covariance"
    count = len(classes) if solved else config.partition.virtual_clients
    order = classes if solved else np.random.default_rng(seed).permutation(classes)
    people, most = Groups(order, count), config.partition.max_images_per_user
    settings: dict[str, Any] = section.model_dump() if solved else {"sampling_probability": 1.0}
    settings |= {"rounds": section.rounds, "l2_norm_clip": section.l2_norm_clip}
    settings |= {"virtual_clients": count, "groupings": 1, "noise_multiplier": noise * count}
    if solved:
        settings["units_per_round"] = count
    plan = MECHANISMS["covariance" if solved else "group_poisson_gaussian"](**settings)

    def load(client: Any) -> Any:
        mine = np.isin(photos[1], people.users[client.users])
        if solved:
            return plain_rows(photos[0][mine][:most], photos[1][mine][:most])
        return ClientExamples(client.grouping, client.group, photos[0][mine], photos[1][mine])

    mechanism = build_mechanism(plan, secrets.token_bytes(32), "study", 1, "0" * 64)
    function: Any = (
        CovarianceFunction(tip, mechanism)
        if solved
        else RoundFunction(tip, mechanism, training.local, seed=seed)
    )
    state = initial_state(function.initial_weights())
    with Feed(function, mechanism, first=0, index=cast("Any", people), load=load) as feed:
        for done in run_rounds(function, mechanism, training.server, state, feed):
            state = done.state
    assign_weights(tip.trainable_variables, released_weights(training.server, state))


def embeddings(options: argparse.Namespace) -> None:
    """Measures the frozen features, and projections at several noises, against them."""
    config = configured(options)
    path = options.cache / f"{options.kind}-{options.data}-{config.model.principal_directions}.npz"
    ours, theirs, tip = photo_features(config, options.data, path)
    users = np.unique(theirs[1], return_inverse=True)[1]
    subjects = Subjects(users, users.astype(np.uint64), np.full(len(users), ""))
    how = EvaluationConfig(false_accept_rates=(1e-3, 1e-2))
    start = m.measure(subjects, theirs[0], how)

    def row(name: str, found: m.Measured) -> None:
        figures, before = (
            [*one.verification.recall, one.retrieval.nearest_neighbour] for one in (found, start)
        )
        gains = [a - b for a, b in zip(figures, before, strict=True)]
        shown = " / ".join(f"{g.value:+.3f} [{g.low:+.3f}, {g.high:+.3f}]" for g in gains)
        show(name, " / ".join(f"{one.value:.3f}" for one in figures), shown)

    row("features", start)
    before = tip.get_weights()
    for noise in options.noise:
        for seed in range(options.runs):
            tip.set_weights(before)
            train_projection(tip, ours, config, noise, seed)
            found = np.asarray(unit_rows(tip(theirs[0])))
            if options.kind == "projection":  # beside the unchanged features
                found = np.asarray(unit_rows(np.concatenate([found, theirs[0]], axis=1)))
            row(f"noise {noise:g}", m.measure(subjects, found, how))


def main() -> None:
    """Measures one table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kind", choices=["covariance", "projection"])
    parser.add_argument("backbone", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--data", choices=[*FILES], default="cars")
    parser.add_argument("--noise", type=float, nargs="+", default=[0.001, 0.01])
    parser.add_argument("--set", nargs="*", default=[], help="Settings of the preset.")
    options = parser.parse_args()
    options.cache.mkdir(parents=True, exist_ok=True)
    embeddings(options)


if __name__ == "__main__":
    main()
