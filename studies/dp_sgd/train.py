"""One row of the study: data, mechanism, rounds, accuracy; the rounds are those of the product."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
from dp_accounting import dp_event as dpe
from dp_accounting.privacy_accountant import NeighboringRelation

from fedemb.config import (
    LossConfig,
    ModelConfig,
    PretrainingConfig,
    ServerConfig,
    SourceConfig,
    UnitGradientConfig,
)
from fedemb.data.builtin import PRIVATE, draw_classes, drawn_images
from fedemb.data.photos import PhotoReader
from fedemb.data.sources import read_public_images
from fedemb.engine import assign_weights, build_backbone, configure_threads, pretrain
from fedemb.engine.feature_cache import rows_of
from fedemb.engine.heads import HeadGradientFunction, LeastSquaresFunction
from fedemb.engine.rounds import ClientExamples, Feed, UnitFeatures, run_rounds
from fedemb.engine.server import initial_state, released_weights
from fedemb.engine.units import UnitGradientFunction
from fedemb.foundation.canonical_json import json_digest
from fedemb.models.backbones import without_head
from fedemb.models.inference import classify
from fedemb.models.keras_backend import preprocess
from fedemb.models.layers import fit_constants
from fedemb.privacy.accounting import price
from fedemb.privacy.mechanism import MechanismPlan
from fedemb.privacy.planning import with_target_epsilon
from fedemb.privacy.registry import MECHANISMS
from fedemb.privacy.running import build_mechanism
from studies.dp_sgd.grid import DELTA, HELD_OUT, TRAIN, Row

CLASSES = ("plane", "car", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
PUBLIC = 20_000
"""Images of Tiny-ImageNet that the public backbone trains on."""
WRITERS, HELD_OUT_WRITERS, EACH = 3000, 500, 4


@dataclass(frozen=True)
class Units:
    """Who may be sampled: `sampling.Index` of units in memory, unit u with images[u]."""

    images: np.ndarray
    """uint8 `[units, images, size, size, channels]`."""
    labels: np.ndarray
    """`[units, images]`."""
    virtual_clients: int = 1
    groupings: int = 1

    @property
    def user_count(self) -> int:
        """Units."""
        return len(self.labels)

    @cached_property
    def user_keys(self) -> np.ndarray:
        """Names of units, ascending."""
        return np.arange(self.user_count, dtype=np.uint64)


@dataclass(frozen=True)
class Data:
    """Files of the study, and what is computed from public images once."""

    folder: Path
    cache: Path

    def cifar(self) -> tuple[Units, np.ndarray, np.ndarray]:
        """Training units of one image, and images and labels that are measured."""
        images, labels = self._read("cifar10_train.parquet")
        order = np.random.default_rng(7).permutation(len(labels))
        train, rest = order[:TRAIN], order[TRAIN : TRAIN + HELD_OUT]
        return Units(images[train][:, None], labels[train][:, None]), images[rest], labels[rest]

    def _read(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        path = self.cache / f"{Path(name).stem}.npz"
        if not path.exists():
            columns = {"user_id": None, "label": "label"}
            source = {"uri": str(self.folder / name), "label_scope": "global", "columns": columns}
            images, labels = read_public_images(
                SourceConfig.model_validate(source), PhotoReader(32, channels=3)
            )
            path.parent.mkdir(parents=True, exist_ok=True)
            np.savez(path, images=images, labels=np.unique(labels, return_inverse=True)[1])
        with np.load(path) as found:
            return found["images"], found["labels"]

    def public_net(self, model: ModelConfig) -> Any:
        """A net trained on Tiny-ImageNet, with a head that starts at zero."""
        net = build_backbone(model, 0)
        path = self.cache / f"start-{json_digest(model.model_dump(mode='json'))[:12]}.npz"
        trunk = without_head(net)
        if not path.exists():
            images, labels = self._read("tinyimagenet32.parquet")
            chosen = np.random.default_rng(0).permutation(len(labels))[:PUBLIC]
            recipe = PretrainingConfig(
                kind="supervised",
                source=SourceConfig(uri="tinyimagenet32.parquet"),
                epochs=4,
                learning_rate=0.1,
                loss=LossConfig(kind="softmax"),
            )
            pretrain(trunk, images[chosen], labels[chosen], recipe, seed=0)
            np.savez(path, *trunk.get_weights())
        with np.load(path) as found:
            trunk.set_weights([found[name] for name in found.files])
        return net

    def features(self, kind: str, images: np.ndarray, part: str) -> np.ndarray:
        """Features of frozen nets; kept."""
        path = self.cache / f"features-{kind}-{part}.npy"
        if not path.exists():
            trunk = without_head(self._frozen(kind))
            pieces = np.array_split(images, max(1, len(images) // 64))
            found = [trunk(preprocess(piece), training=False).numpy() for piece in pieces]
            np.save(path, np.concatenate(found))
        return np.load(path)

    def _frozen(self, kind: str) -> Any:
        if kind == "public":
            return self.public_net(net_model("resnet8"))
        net = build_backbone(
            net_model("scatter_linear", mirrored=True, whitened_directions=300, embedding_dim=7776),
            0,
        )
        fit_constants(without_head(net), drawn_images(1000, 32, 3, seed=0))
        return net


def net_model(backbone: str, **settings: Any) -> ModelConfig:
    """A classifier of CIFAR-10."""
    common = {"image_size": 32, "channels": 3, "projection": False, "embedding_dim": 64}
    return ModelConfig(backbone=backbone, classes=CLASSES, **{**common, **settings})


def planned(kind: str, epsilon: float, population: int, **section: Any) -> MechanismPlan:
    """The plan of least noise for an epsilon."""
    common = {"virtual_clients": 1, "groupings": 1, "noise_multiplier": 1.0}
    return with_target_epsilon(MECHANISMS[kind](**common, **section), epsilon, DELTA)


def poisson(settings: dict[str, Any], epsilon: float, population: int) -> MechanismPlan:
    """DP-SGD at an epsilon; `share` of its batch and noise are left, where that is asked for."""
    batch = settings["batch"]
    plan = planned(
        "poisson_gaussian",
        epsilon,
        population,
        rounds=settings["rounds"],
        sampling_probability=min(1.0, batch / population),
        units_per_round=batch,
    )
    return plan.scaled(compute=settings["share"]) if "share" in settings else plan


def rounds(kind: Any, server: ServerConfig, units: Units, load: Callable[[Any], Any]) -> np.ndarray:
    """Runs all rounds; the weights that would be released."""
    state = initial_state(kind.initial_weights())
    with Feed(kind, kind.mechanism, first=0, index=cast("Any", units), load=load) as feed:
        for done in run_rounds(kind, kind.mechanism, server, state, feed):
            state = done.state
    return released_weights(server, state)


def mechanism_of(plan: MechanismPlan) -> Any:
    """With a fresh key, as in a real run."""
    return build_mechanism(plan, secrets.token_bytes(32), "study", 1, "0" * 64)


def server_of(settings: dict[str, Any], rate: float) -> ServerConfig:
    """Linear decay, momentum, no average unless asked for."""
    return ServerConfig(
        learning_rate=rate,
        momentum=0.9,
        schedule="linear",
        rescale_to_unit_norm=True,
        ema_decay=settings.get("average", 0.0),
    )


def run_row(row: Row, data: Data) -> dict[str, Any]:
    """Trains and measures a row, or prices it.

    Returns:
      `value` (accuracy, or an epsilon), `noise` on the mean / clip, `epsilon`, seconds.
    """
    started = time.monotonic()
    act = {"samplers": _price, "units": _users, "ladder": _net}.get(row.part)
    if act is None:
        act = _net if "net" in row.settings else _head
    configure_threads(1)
    found = act(row, data)
    return {**found, "seconds": round(time.monotonic() - started, 1)}


def _price(row: Row, data: Data) -> dict[str, Any]:
    """Epsilon of ten epochs at the noise of the row."""
    del data
    epochs, steps = row.settings["epochs"], row.settings["rounds_per_epoch"]
    gaussian = dpe.GaussianDpEvent(row.at)
    event = {
        "poisson": dpe.SelfComposedDpEvent(
            dpe.PoissonSampledDpEvent(1 / steps, gaussian), epochs * steps
        ),
        # Which batch a unit is in may be known, so a pass is one round on all of them.
        "shuffled": dpe.GaussianDpEvent(row.at / math.sqrt(epochs)),
    }[row.name]
    epsilon = price(event, NeighboringRelation.ADD_OR_REMOVE_ONE, DELTA).epsilon
    return {"value": epsilon, "noise": row.at, "epsilon": epsilon}


def _head(row: Row, data: Data) -> dict[str, Any]:
    settings, epsilon = row.settings, row.settings.get("epsilon", row.at)
    units, images, labels = data.cifar()
    kind = settings["features"]
    ours = data.features(kind, units.images[:, 0], "train")
    theirs = data.features(kind, images, "held_out")
    if kind == "public":  # the mean length of private features, for a study only
        length = np.linalg.norm(ours, axis=1).mean(dtype=np.float32)
        ours, theirs = ours / length, theirs / length
    rows = rows_of(ours, units.labels[:, 0])

    def load(unit: Any) -> UnitFeatures:
        (place,) = unit.users
        return rows[place : place + 1]

    squares = settings.get("solver") == "squares"
    if squares:
        plan = planned("least_squares", epsilon, TRAIN, units_per_round=TRAIN)
    else:
        plan = poisson(settings, epsilon, TRAIN).replaced(l2_norm_clip=0.1)
    function = LeastSquaresFunction if squares else HeadGradientFunction
    best = 0.0
    for rate in settings.get("rates", [settings.get("rate", 1.0)]):
        head = function(linear_head(ours.shape[1]), mechanism_of(plan), UnitGradientConfig())
        weights = rounds(head, server_of(settings, rate), units, load).reshape(-1, len(CLASSES))
        scores = theirs @ weights[:-1] + weights[-1]
        best = max(best, float((scores.argmax(1) == labels).mean()))
    return {"value": best, **_costs(plan, epsilon)}


def linear_head(dim: int) -> Any:
    """Returns a classifier of features that starts at zero."""
    import keras

    from fedemb.models.backbones import HEAD

    inputs = keras.Input((dim,))
    head = keras.layers.Dense(len(CLASSES), kernel_initializer="zeros", name=HEAD)
    return keras.Model(inputs, head(inputs))


def _costs(plan: MechanismPlan, epsilon: float) -> dict[str, Any]:
    return {
        "epsilon": epsilon,
        "noise": plan.noise_multiplier / plan.normalizer,
        "noise_multiplier": plan.noise_multiplier,
        "batch": plan.normalizer,
    }


def _train_net(
    net: Any, plan: MechanismPlan, unit: UnitGradientConfig, units: Units, server: ServerConfig
) -> None:
    function = UnitGradientFunction(
        net, mechanism_of(plan), unit, variables=net.trainable_variables
    )

    def load(one: Any) -> ClientExamples:
        (place,) = one.users
        images, labels = units.images[place], units.labels[place]
        if plan.samples_images:
            images, labels = (part[one.grouping : one.grouping + 1] for part in (images, labels))
        return ClientExamples(one.grouping, one.group, images, labels)

    assign_weights(net.trainable_variables, rounds(function, server, units, load))


def _accuracy(net: Any, images: np.ndarray, labels: np.ndarray) -> float:
    return float((classify(net, images).argmax(1) == labels).mean())


def _net(row: Row, data: Data) -> dict[str, Any]:
    settings, epsilon = row.settings, row.settings.get("epsilon", row.at)
    units, images, labels = data.cifar()
    model = net_model(settings["net"], **settings.get("model", {}))
    net = data.public_net(model) if settings.get("start") else build_backbone(model, row.seed)
    plan = poisson(settings, epsilon, settings.get("population", TRAIN))
    views = settings.get("views", 1)
    unit = UnitGradientConfig(
        views=views, flip=views > 1, crop_padding=4 if views > 1 else 0, microbatch=16
    )
    if "share" in settings:  # as many a round as planned, of the units there are
        plan = plan.replaced(sampling_probability=plan.normalizer / TRAIN)
    _train_net(net, plan, unit, units, server_of(settings, settings["rate"]))
    return {"value": _accuracy(net, images, labels), **_costs(plan, epsilon)}


def _users(row: Row, data: Data) -> dict[str, Any]:
    """Both ways for the same epsilon, and as many images a round."""
    del data
    people = WRITERS + HELD_OUT_WRITERS
    drawn = list(
        draw_classes(PRIVATE, seed=0, users=people, images_each=EACH, image_size=28, classes=10)
    )
    images = np.concatenate([part[0] for part in drawn])[..., None]
    labels = np.concatenate([part[1] for part in drawn])
    units = Units(images[:WRITERS], labels[:WRITERS])
    chance = 0.1
    common = {"rounds": 60, "sampling_probability": chance, "l2_norm_clip": row.settings["clip"]}
    if row.name.startswith("whole"):
        plan = planned(
            "poisson_gaussian", row.at, WRITERS, units_per_round=round(chance * WRITERS), **common
        )
        unit = UnitGradientConfig(images_per_unit=EACH, microbatch=32)
    else:
        plan = planned(
            "capped_image_poisson",
            row.at,
            WRITERS,
            images_per_round=round(chance * WRITERS * EACH),
            images_per_user=EACH,
            **common,
        )
        unit = UnitGradientConfig(microbatch=32)
    model = ModelConfig(backbone="tanh_cnn", embedding_dim=32, classes=tuple("0123456789"))
    net = build_backbone(model, row.seed)
    _train_net(net, plan, unit, units, server_of(row.settings, 1.0))
    held_out = images[WRITERS:].reshape(-1, 28, 28, 1)
    return {
        "value": _accuracy(net, held_out, labels[WRITERS:].ravel()),
        **_costs(plan, row.at),
    }
