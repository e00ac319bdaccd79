"""Trains private heads and projections on frozen features of photos, with the engine of a run.

    python -m studies.photos covariance lite2.keras FOLDER --cache CACHE --data groceries
    python -m studies.photos projection lite2.keras FOLDER --cache CACHE
    python -m studies.photos head lite2.keras FOLDER --cache CACHE --size 160

FOLDER has the Parquet files of `FEDEMB_DATA`. Features are computed once and kept in CACHE. No
ledger and no gate: nothing here can be released. Results: README.md.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np

from fedemb.config import EvaluationConfig, ModelConfig, RunConfig, ServerConfig, SourceConfig
from fedemb.config.training import UnitGradientConfig
from fedemb.data.photos import PhotoReader
from fedemb.data.sources import read_public_images, read_some_public_images
from fedemb.evaluation import held_out as m
from fedemb.evaluation.held_out import Subjects
from fedemb.models.backbone_files import read_card
from fedemb.models.backbones import HEAD, cut
from fedemb.models.imported import import_backbone
from fedemb.models.layers import fit, whitened_layer
from fedemb.models.losses import unit_rows
from fedemb.models.public_features import fit_features
from fedemb.pipelines.run.load_config import load_config
from fedemb.privacy.planning import with_target_epsilon
from fedemb.privacy.registry import MECHANISMS
from fedemb.training.feature_cache import MicroBatches, plain_rows, rows_of
from fedemb.training.heads import CovarianceFunction, HeadGradientFunction, LeastSquaresFunction
from fedemb.training.rounds import ClientExamples, assign_weights
from fedemb.training.tensorflow_clients import RoundFunction
from studies.shared import Groups, trained_weights

FILES = {"cars": "cars140_160.parquet", "groceries": "grocery_96.parquet"}
TAPS = ("head", "last_block")
PIECE = 1000
"""Images per feature file; an interrupted study resumes after the last file."""
Photos = tuple[np.ndarray, np.ndarray]
"""Features and classes."""


def show(*cells: str) -> None:
    """Prints a row of a table."""
    sys.stdout.write(f"| {' | '.join(cells)} |\n")
    sys.stdout.flush()


# ---- embeddings: projections of cars and groceries ----------------------------------------------


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
        fit_features(backbone, read_some_public_images(start.source, reader, 5000, 0))
        label = "user_id" if data == "cars" else "label"
        columns = {"user_id": None, "label": label}
        tree = {"uri": config.data.source.uri, "columns": columns, "label_scope": "global"}
        kept: dict[str, Any] = {}
        for part in ("train", "test"):
            where = {"split": (part,)} if data == "cars" else {}
            source = SourceConfig.model_validate({**tree, "where": where})
            images, classes = read_public_images(source, reader)
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

    def make(mechanism: Any) -> Any:
        if solved:
            return CovarianceFunction(tip, mechanism)
        return RoundFunction(tip, mechanism, training.local, seed=seed)

    weights = trained_weights(make, plan, training.server, people, load)
    assign_weights(tip.trainable_variables, weights)


def embeddings(options: argparse.Namespace) -> None:
    """Measures the frozen features, and projections at several noises, against them."""
    config = configured(options)
    path = options.cache / f"{options.kind}-{options.data}-{config.model.principal_directions}.npz"
    ours, theirs, tip = photo_features(config, options.data, path)
    if options.validate:
        held = np.isin(ours[1], np.random.default_rng(1).permutation(np.unique(ours[1]))[::3])
        theirs, ours = (ours[0][held], ours[1][held]), (ours[0][~held], ours[1][~held])
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


# ---- heads on CIFAR-10 --------------------------------------------------------------------------


def net_features(options: argparse.Namespace, images: Any, name: str) -> np.ndarray:
    """Returns features of both taps, averaged with the mirror image; computes what is missing.

    Args:
      options: backbone, size of its input, and cache.
      images: uint8 `[images, size, size, 3]`.
      name: name of the images in the cache.
    """
    card = read_card(options.backbone)
    assert card is not None, "written by fedemb backbone get"
    model = ModelConfig(
        backbone="imported",
        taps=TAPS,
        mirrored=True,
        projection=False,
        image_size=options.size,
        channels=3,
        embedding_dim=sum(tap.features for tap in card.taps if tap.name in TAPS),
    )
    net: MicroBatches | None = None
    pieces = []
    for start in range(0, len(images), PIECE):
        path = options.cache / f"{options.backbone.stem}-{name}-{start:06d}.npy"
        if not path.exists():
            net = net or MicroBatches(import_backbone(options.backbone, model))
            np.save(path, net(images[start : start + PIECE]))
        pieces.append(np.load(path))
    return np.concatenate(pieces)


def accuracy(ours: Photos, theirs: Photos, epsilon: float, rate: float | None) -> float:
    """Trains a head by DP-SGD with full batches, or solves it, and returns its accuracy in percent.

    Args:
      ours: features of private images, rows of length 1, and their classes.
      theirs: the same of held-out images.
      epsilon: privacy budget at delta 1e-5, for adding or removing an image.
      rate: learning rate of the server; None solves the head from one round of least squares.
    """
    import keras

    count, dim = ours[0].shape
    settings: dict[str, Any] = {"rounds": 1, "units_per_round": count}
    kind, function = "least_squares", LeastSquaresFunction
    server = ServerConfig(ema_decay=0.0, ridge=2.0)
    if rate is not None:
        settings |= {"rounds": 80, "sampling_probability": 1.0, "l2_norm_clip": 0.1}
        kind, function = "poisson_gaussian", HeadGradientFunction
        server = ServerConfig(
            learning_rate=rate,
            momentum=0.9,
            schedule="cosine",
            rescale_to_unit_norm=True,
            ema_decay=0.9,
        )
    plan = MECHANISMS[kind](virtual_clients=1, groupings=1, noise_multiplier=1.0, **settings)
    inputs = keras.Input((dim,))
    classes = len(np.unique(ours[1]))
    head = keras.layers.Dense(classes, kernel_initializer="zeros", name=HEAD)(inputs)
    rows = rows_of(ours[0], ours[1])
    weights = trained_weights(
        lambda mechanism: function(keras.Model(inputs, head), mechanism, UnitGradientConfig()),
        with_target_epsilon(plan, epsilon, 1e-5),
        server,
        Groups(np.arange(count)),
        lambda unit: rows[unit.users[0] : unit.users[0] + 1],
    ).reshape(dim + 1, -1)
    scores = theirs[0] @ weights[:-1] + weights[-1]
    return 100 * float((scores.argmax(1) == theirs[1]).mean())


def heads(options: argparse.Namespace) -> None:
    """Measures a row for each budget and rate."""
    reader = PhotoReader(options.size, channels=3)

    def source(name: str) -> SourceConfig:
        tree = {"uri": str(options.folder / name), "columns": {"label": "label"}}
        return SourceConfig.model_validate({**tree, "label_scope": "global"})

    some = read_some_public_images(source("tinyimagenet32.parquet"), reader, 6000, 0)
    public = net_features(options, some, "public")
    images, labels = read_public_images(source("cifar10_train.parquet"), reader)
    found = net_features(options, images, "cifar")
    layer = whitened_layer()(directions=options.directions, square_root=True, reduce=options.solve)
    layer.build((None, 1, 1, public.shape[1]))
    fit(layer, public[:, None, None])
    pieces = np.array_split(found[:, None, None], max(1, len(found) // 4096))
    scaled = np.concatenate([np.asarray(layer(piece)) for piece in pieces])
    order = np.random.default_rng(7).permutation(len(labels))
    measured = len(order) // 10
    parts = order[:-measured][: options.images], order[-measured:]
    ours, theirs = ((scaled[part], labels[part]) for part in parts)
    for epsilon in options.epsilon:
        for rate in [None] if options.solve else options.rate:
            runs = [accuracy(ours, theirs, epsilon, rate) for _ in range(options.runs)]
            show(f"{epsilon:g}", str(rate), f"{np.mean(runs):.1f}", *(f"{one:.1f}" for one in runs))


def main() -> None:
    """Measures one table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kind", choices=["covariance", "projection", "head"])
    parser.add_argument("backbone", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--data", choices=[*FILES], default="cars")
    parser.add_argument("--noise", type=float, nargs="+", default=[0.001, 0.01])
    parser.add_argument("--validate", action="store_true", help="Measure training classes.")
    parser.add_argument("--set", nargs="*", default=[], help="Settings of the preset.")
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--images", type=int, default=45_000, help="Number of private images.")
    parser.add_argument("--directions", type=int, default=300)
    parser.add_argument("--epsilon", type=float, nargs="+", default=[0.5, 1.0, 2.0, 8.0])
    parser.add_argument("--rate", type=float, nargs="+", default=[200.0, 400.0, 600.0])
    parser.add_argument("--solve", action="store_true", help="Head from one round.")
    options = parser.parse_args()
    options.cache.mkdir(parents=True, exist_ok=True)
    (heads if options.kind == "head" else embeddings)(options)


if __name__ == "__main__":
    main()
