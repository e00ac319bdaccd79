"""Divides frozen features by their private covariance, with the engine of a run.

    python -m studies.photos.whitening lite2.keras FOLDER --cache CACHE --data cars

FOLDER has `cars140_160.parquet` and `grocery_96.parquet`: the photos of one are private, and those
of the other give the public constants. The noise on the mean is a share of the clip, as for many
users. The measured classes are the 42 test classes of cars, or a third of the groceries.
`--validate` measures a third of the training classes instead, and trains on the rest.
"""

from __future__ import annotations

import argparse
import secrets
from pathlib import Path
from typing import Any, cast

import numpy as np

from fedemb.config import EvaluationConfig, RunConfig
from fedemb.data.photos import PhotoReader
from fedemb.data.sources import read_public_images, read_some_public_images
from fedemb.engine.feature_cache import MicroBatches, plain_rows
from fedemb.engine.heads import CovarianceFunction
from fedemb.engine.rounds import Feed, UnitFeatures, assign_weights, run_rounds
from fedemb.engine.server import initial_state, released_weights
from fedemb.evaluation import held_out as m
from fedemb.evaluation.held_out import Subjects
from fedemb.models.backbones import cut
from fedemb.models.imported import import_backbone
from fedemb.models.losses import unit_rows
from fedemb.models.public_features import fit_features
from fedemb.pipelines.run.load_config import load_config
from fedemb.privacy.registry import MECHANISMS
from fedemb.privacy.running import build_mechanism
from studies.photos.projections import Groups, print_row

FILES = {"cars": "cars140_160.parquet", "groceries": "grocery_96.parquet"}
Photos = tuple[np.ndarray, np.ndarray]
"""Features and classes."""


def features(config: RunConfig, data: str, cache: Path) -> tuple[Photos, Photos, Any]:
    """Returns the features of training and test classes, and the projection."""
    model, start = config.model, config.pretraining
    reader, backbone = PhotoReader.of(model), import_backbone(Path(start.import_path or ""), model)
    trunk, tip = cut(backbone, "projection")
    path = cache / f"{data}-{model.principal_directions}.npz"
    if not path.exists():
        assert start.source is not None
        fit_features(backbone, read_some_public_images(start.source, reader, 5000, 0))
        net = MicroBatches(trunk)
        columns = {"user_id": None, "label": "user_id" if data == "cars" else "label"}
        source = config.data.source.model_validate(
            {"uri": config.data.source.uri, "columns": columns, "label_scope": "global"}
        )
        kept: dict[str, np.ndarray] = {}
        if data == "cars":
            parts = {
                name: read_public_images(
                    source.model_copy(update={"where": {"split": (name,)}}), reader
                )
                for name in ("train", "test")
            }
        else:
            images, classes = read_public_images(source, reader)
            test = np.isin(classes, np.random.default_rng(0).permutation(np.unique(classes))[::3])
            parts = {
                "train": (images[~test], classes[~test]),
                "test": (images[test], classes[test]),
            }
        for name, (images, classes) in parts.items():
            kept |= {f"{name}_features": net(images), f"{name}_classes": classes}
        np.savez(path, **cast("dict[str, Any]", kept))
    with np.load(path) as found:
        ours, theirs = (
            (found[f"{name}_features"], found[f"{name}_classes"]) for name in ("train", "test")
        )
    return ours, theirs, tip


def train(tip: Any, photos: Photos, config: RunConfig, *, noise: float) -> None:
    """Solves the projection in place, from one noised round of the mechanism."""
    classes = np.unique(photos[1])
    settings: dict[str, Any] = config.mechanism.model_dump()
    settings |= {
        "virtual_clients": len(classes),
        "groupings": 1,
        "units_per_round": len(classes),
        "noise_multiplier": noise * len(classes),
    }
    plan = MECHANISMS["covariance"](**settings)
    people = Groups(classes, len(classes))
    mechanism = build_mechanism(plan, secrets.token_bytes(32), "study", 1, "0" * 64)
    most = config.partition.max_images_per_user

    def load(client: Any) -> UnitFeatures:
        mine = np.isin(photos[1], people.classes[client.users])
        return plain_rows(photos[0][mine][:most], photos[1][mine][:most])

    function, server = CovarianceFunction(tip, mechanism), config.training.server
    state = initial_state(function.initial_weights())
    with Feed(function, mechanism, first=0, index=cast("Any", people), load=load) as feed:
        for done in run_rounds(function, mechanism, server, state, feed):
            state = done.state
    assign_weights(tip.trainable_variables, released_weights(server, state))


def main() -> None:
    """Measures the frozen features and whitened features at several noises."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("backbone", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--data", choices=[*FILES], default="cars")
    parser.add_argument("--noise", type=float, nargs="+", default=[0.0003, 0.001, 0.003])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--validate", action="store_true")
    parser.add_argument("--set", nargs="*", default=[])
    options = parser.parse_args()
    options.cache.mkdir(parents=True, exist_ok=True)
    (public,) = FILES.keys() - {options.data}
    sources = {
        "data.source.uri": options.folder / FILES[options.data],
        "pretraining.source.uri": options.folder / FILES[public],
        "pretraining.import_path": options.backbone,
    }
    settings = [f"{name}={path}" for name, path in sources.items()]
    if public == "cars":
        settings.append("pretraining.source.columns.label=user_id")
    config = load_config("cars_whitening", [*settings, *options.set])
    ours, theirs, tip = features(config, options.data, options.cache)
    if options.validate:
        held = np.isin(ours[1], np.random.default_rng(1).permutation(np.unique(ours[1]))[::3])
        theirs, ours = (ours[0][held], ours[1][held]), (ours[0][~held], ours[1][~held])
    users = np.unique(theirs[1], return_inverse=True)[1]
    subjects = Subjects(users, users.astype(np.uint64), np.full(len(users), ""))
    how = EvaluationConfig(false_accept_rates=(1e-3, 1e-2))
    start = m.measure(subjects, theirs[0], how)
    print_row("features", start, start)
    before = tip.get_weights()
    for noise in options.noise:
        for _ in range(options.runs):
            tip.set_weights(before)
            train(tip, ours, config, noise=noise)
            found = m.measure(subjects, np.asarray(unit_rows(tip(theirs[0]))), how)
            print_row(f"noise {noise:g}", found, start)


if __name__ == "__main__":
    main()
