"""Trains private heads on frozen features of CIFAR-10 with the engine and mechanism of a run.

    python -m studies.photos.heads lite0.keras FOLDER --cache CACHE

FOLDER has `cifar10_train.parquet` and `tinyimagenet32.parquet`. Features are computed once and kept
in CACHE. No ledger and no gate: nothing here can be released.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np

from fedemb.config import ModelConfig, ServerConfig, SourceConfig
from fedemb.config.training import UnitGradientConfig
from fedemb.data.photos import PhotoReader
from fedemb.data.sources import read_public_images, read_some_public_images
from fedemb.engine.feature_cache import MicroBatches, rows_of
from fedemb.engine.heads import HeadGradientFunction, LeastSquaresFunction
from fedemb.engine.rounds import UnitFeatures
from fedemb.models.backbone_files import read_card
from fedemb.models.imported import import_backbone
from fedemb.models.layers import fit, whitened_layer
from studies.dp_sgd.train import Units, linear_head, mechanism_of, planned, rounds

CLIP = 0.1
TAPS = ("head", "last_block")
PIECE = 1000
"""Images per feature file; an interrupted study resumes after the last file."""


def net_features(backbone: Path, size: int, images: Any, name: str, cache: Path) -> np.ndarray:
    """Returns features of both taps, averaged with the mirror image; computes what is missing.

    Args:
      backbone: file of `fedemb backbone get`.
      size: pixels of its input.
      images: uint8 `[images, size, size, 3]`.
      name: name of the images in the cache.
      cache: folder of the features.
    """
    card = read_card(backbone)
    assert card is not None, "written by fedemb backbone get"
    model = ModelConfig(
        backbone="imported",
        taps=TAPS,
        mirrored=True,
        projection=False,
        image_size=size,
        channels=3,
        embedding_dim=sum(tap.features for tap in card.taps if tap.name in TAPS),
    )
    net: MicroBatches | None = None
    pieces = []
    for start in range(0, len(images), PIECE):
        path = cache / f"{backbone.stem}-{name}-{start:06d}.npy"
        if not path.exists():
            net = net or MicroBatches(import_backbone(backbone, model))
            np.save(path, net(images[start : start + PIECE]))
        pieces.append(np.load(path))
    return np.concatenate(pieces)


def accuracy(
    features: tuple[np.ndarray, np.ndarray],
    labels: tuple[np.ndarray, np.ndarray],
    *,
    epsilon: float,
    rate: float | None,
    steps: int = 80,
) -> float:
    """Trains a head by DP-SGD with full batches, or solves it, and returns its accuracy in percent.

    Args:
      features: of private and of held-out images, `[images, features]`, rows of length 1.
      labels: their classes.
      epsilon: privacy budget at delta 1e-5, for adding or removing an image.
      rate: learning rate of the server; None solves the head from one round of least squares.
      steps: number of rounds.
    """
    ours, theirs = features
    count = len(ours)
    if rate is None:
        plan = planned("least_squares", epsilon, count, rounds=1, units_per_round=count)
        kind, server = LeastSquaresFunction, ServerConfig(ema_decay=0.0, ridge=2.0)
    else:
        plan = planned(
            "poisson_gaussian",
            epsilon,
            count,
            rounds=steps,
            sampling_probability=1.0,
            units_per_round=count,
            l2_norm_clip=CLIP,
        )
        kind = HeadGradientFunction
        server = ServerConfig(
            learning_rate=rate,
            momentum=0.9,
            schedule="cosine",
            rescale_to_unit_norm=True,
            ema_decay=0.9,
        )
    rows = rows_of(ours, labels[0])

    def load(unit: Any) -> UnitFeatures:
        (place,) = unit.users
        return rows[place : place + 1]

    function = kind(linear_head(ours.shape[1]), mechanism_of(plan), UnitGradientConfig())
    units = Units(np.zeros((count, 1, 1, 1, 1), np.uint8), labels[0][:, None])
    weights = rounds(function, server, units, load).reshape(ours.shape[1] + 1, -1)
    scores = theirs @ weights[:-1] + weights[-1]
    return 100 * float((scores.argmax(1) == labels[1]).mean())


def main() -> None:
    """Measures one table: a row for each budget and rate, three runs."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("backbone", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--images", type=int, default=45_000, help="Number of private images.")
    parser.add_argument("--directions", type=int, default=300)
    parser.add_argument("--epsilon", type=float, nargs="+", default=[0.5, 1.0, 2.0, 8.0])
    parser.add_argument("--rate", type=float, nargs="+", default=[200.0, 400.0, 600.0])
    parser.add_argument("--solve", action="store_true", help="One round of least squares.")
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    options.cache.mkdir(parents=True, exist_ok=True)
    reader = PhotoReader(options.size, channels=3)

    def source(name: str) -> SourceConfig:
        columns = {"label": "label"}
        tree = {"uri": str(options.folder / name), "columns": columns, "label_scope": "global"}
        return SourceConfig.model_validate(tree)

    shape = (options.backbone, options.size)
    some = read_some_public_images(source("tinyimagenet32.parquet"), reader, 6000, 0)
    public = net_features(*shape, some, "public", options.cache)
    images, labels = read_public_images(source("cifar10_train.parquet"), reader)
    found = net_features(*shape, images, "cifar", options.cache)
    order = np.random.default_rng(7).permutation(len(labels))
    parts = order[: min(options.images, 45_000)], order[45_000:]
    layer = whitened_layer()(directions=options.directions, square_root=True, reduce=options.solve)
    layer.build((None, 1, 1, public.shape[1]))
    fit(layer, public[:, None, None])
    pieces = np.array_split(found[:, None, None], max(1, len(found) // 4096))
    scaled = np.concatenate([np.asarray(layer(piece)) for piece in pieces])
    for epsilon in options.epsilon:
        for rate in [None] if options.solve else options.rate:
            measured = [
                accuracy(
                    (scaled[parts[0]], scaled[parts[1]]),
                    (labels[parts[0]], labels[parts[1]]),
                    epsilon=epsilon,
                    rate=rate,
                )
                for _ in range(options.runs)
            ]
            runs = ", ".join(f"{value:.1f}" for value in measured)
            sys.stdout.write(f"| {epsilon:g} | {rate} | {np.mean(measured):.1f} | {runs} |\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
