"""Trains a private projection or the last block of a public network, with the engine of a run.

    python -m studies.photos covariance lite2.keras FOLDER --cache CACHE --data groceries
    python -m studies.photos projection lite2.keras FOLDER --cache CACHE
    python -m studies.photos block lite2.keras FOLDER --cache CACHE

FOLDER has the Parquet files of `FEDEMB_DATA`. Features are computed once and kept in CACHE. No
ledger and no gate: nothing here can be released. Results: README.md.
"""

from __future__ import annotations

import argparse
import secrets
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from fedemb.config import EvaluationConfig, RunConfig, SourceConfig
from fedemb.data.photos import PhotoReader
from fedemb.data.sources import read_public_images
from fedemb.evaluation import held_out as m
from fedemb.evaluation.held_out import Subjects
from fedemb.models.backbone_files import load_model
from fedemb.models.backbones import cut
from fedemb.models.imported import image_shape, import_backbone
from fedemb.models.losses import unit_rows
from fedemb.models.public_features import fit_features
from fedemb.pipelines.output import say
from fedemb.pipelines.run.load_config import load_config
from fedemb.privacy.registry import plan_mechanism
from fedemb.privacy.running import build_mechanism
from fedemb.training.feature_cache import MicroBatches, plain_rows
from fedemb.training.heads import CovarianceFunction
from fedemb.training.rounds import ClientExamples, Feed, assign_weights, run_rounds
from fedemb.training.server import initial_state, released_weights
from fedemb.training.tensorflow_clients import RoundFunction

FILES = {"cars": "cars140_160.parquet", "groceries": "grocery_96.parquet"}
Photos = tuple[np.ndarray, np.ndarray]
"""Features and classes."""


def configured(options: argparse.Namespace, kind: str) -> RunConfig:
    """Returns the preset; the photos of one kind are private, those of the other public."""
    (public,) = FILES.keys() - {options.data}
    settings = {
        "data.source.uri": options.folder / FILES[options.data],
        "pretraining.source.uri": options.folder / FILES[public],
        "pretraining.source.columns.label": "user_id" if public == "cars" else "label",
        "pretraining.import_path": options.backbone,
        "model.image_size": (image_shape(options.backbone) or (0,))[0],
    }
    preset = "cars_whitening" if kind == "covariance" else "cars_projection"
    more = options.set if kind == options.kind else []
    return load_config(preset, [*(f"{k}={v}" for k, v in settings.items()), *more])


def cut_block(backbone: Any) -> tuple[Any, Any]:
    """Splits EfficientNet-Lite before its last block, whose inputs are flattened."""
    import keras

    net, *rest = backbone.layers[1:]
    start = net.get_layer("block7_1_expand_conv").input
    trunk = keras.Model(net.input, keras.layers.Flatten()(start))
    first = keras.Input(trunk.output_shape[1:]), keras.layers.Reshape(start.shape[1:])
    return trunk, keras.Sequential([*first, keras.Model(start, net.output), *rest])


def photo_features(options: argparse.Namespace, kind: str) -> tuple[Photos, Photos, Any]:
    """Returns the frozen features of training and test classes, and the layers that train.

    The test classes are the 42 of cars, or a third of the groceries.
    """
    config, data = configured(options, kind), options.data
    model, start = config.model, config.pretraining
    path = options.cache / f"{kind}-{data}-{model.principal_directions}.npz"
    reader = PhotoReader(*model.photo)
    fitted = path.with_suffix(".keras")
    if not fitted.exists():
        backbone = import_backbone(Path(start.import_path or ""), model)
        assert start.source is not None
        fit_features(backbone, read_public_images(start.source, reader, 5000)[0])
        backbone.save(fitted)
    backbone = load_model(fitted)
    trunk, tip = cut_block(backbone) if kind == "block" else cut(backbone, "projection")
    if not path.exists():
        columns = {"user_id": None, "label": "user_id" if data == "cars" else "label"}
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
        ours, theirs = ((found[f"{p}_features"], found[f"{p}_classes"]) for p in ("train", "test"))
    return ours, theirs, tip


def train(tip: Any, photos: Photos, config: RunConfig, noise: float, seed: int) -> None:
    """Trains or solves the layers in place, at a noise on the mean in clipping norms."""
    training, section = config.training, config.mechanism
    classes, solved = np.unique(photos[1]), section.kind == "covariance"
    count = len(classes) if solved else config.partition.virtual_clients
    order = classes if solved else np.random.default_rng(seed).permutation(classes)
    most = config.partition.max_images_per_user
    used = np.concatenate([np.flatnonzero(photos[1] == one)[:most] for one in classes])
    features, names = photos[0][used], photos[1][used]
    changes = {"partition.virtual_clients": count, "mechanism.noise_multiplier": noise * count}
    changes |= {"mechanism.units_per_round": count} if solved else {}
    plan = plan_mechanism(config.updated(changes))
    people = SimpleNamespace(
        user_count=len(order),
        user_keys=np.arange(len(order), dtype=np.uint64),
        virtual_clients=count,
        groupings=1,
        members=lambda _, group: np.arange(group, len(order), count),
    )

    def load(client: Any) -> Any:
        mine = np.isin(names, order[client.users])
        if solved:
            return plain_rows(features[mine], names[mine])
        return ClientExamples(client.grouping, client.group, features[mine], names[mine])

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
    """Measures the frozen features, and trained layers at several noises, against them."""
    ours, theirs, tip = photo_features(options, options.kind)
    frozen = photo_features(options, "covariance")[1][0]
    kept = frozen if options.kind == "block" else theirs[0]
    users = np.unique(theirs[1], return_inverse=True)[1]
    subjects = Subjects(users, users.astype(np.uint64), np.full(len(users), ""))
    how = EvaluationConfig(false_accept_rates=(1e-3, 1e-2))
    start = m.measure(subjects, frozen, how)

    def row(name: str, found: m.Measured) -> None:
        figures, first = (
            [*o.verification.recall, o.retrieval.nearest_neighbour] for o in (found, start)
        )
        gains = [a - b for a, b in zip(figures, first, strict=True)]
        shown = " / ".join(f"{g.value:+.3f} [{g.low:+.3f}, {g.high:+.3f}]" for g in gains)
        say(f"| {name} | {' / '.join(f'{one.value:.3f}' for one in figures)} | {shown} |")

    row("features", start)
    before = tip.get_weights()
    for noise in options.noise:
        for seed in range(options.runs):
            tip.set_weights(before)
            train(tip, ours, configured(options, options.kind), noise, seed)
            found = np.asarray(unit_rows(tip(theirs[0])))
            if options.kind != "covariance":  # beside the unchanged features
                found = np.asarray(unit_rows(np.concatenate([found, kept], axis=1)))
            row(f"noise {noise:g}", m.measure(subjects, found, how))


def main() -> None:
    """Measures one table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kind", choices=["covariance", "projection", "block"])
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
