"""Trains an attempt with the algorithm of its configuration, on the examples that it reads."""

# The numeric libraries are not fully typed; the project's own signatures are checked.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from fedemb.data.client_data import UserStore, VerifiedFolder
from fedemb.errors import ConfigError
from fedemb.foundation.canonical_json import JsonObject
from fedemb.privacy.sampling import VirtualClient
from fedemb.runtime.step_context import StepContext
from fedemb.training.attempt import Attempt, Trained, run_attempt
from fedemb.training.backend_rounds import build_rounds
from fedemb.training.client_loader import ClientLoader, all_classes
from fedemb.training.feature_cache import (
    FeatureCache,
    FeatureProgress,
    FrozenFeatures,
    plain_rows,
    rows_of,
    unit_key,
)
from fedemb.training.rounds import ClientExamples, Unit
from fedemb.training.trainer import Trainer


def run(context: StepContext, step: str, *, root_key: bytes | None = None) -> JsonObject:
    """Trains a model; arguments, result and errors are those of `run_attempt`.

    Raises:
      ConfigError: also raised for an algorithm without a guarantee, or that another step runs.
    """
    config = context.config
    algorithm = config.training.algorithm
    other = "train_dp_sgd" if algorithm == "dp_sgd" else "train_dp_fedemb"
    if step != other:
        raise ConfigError(
            f"training.algorithm={algorithm} is run by {other} and not by this step; submit the "
            f"pipeline {other.removeprefix('train_').replace('_', '-')}"
        )
    if algorithm == "dp_fedavg" and config.purpose != "simulation":
        raise ConfigError(
            "training.algorithm=dp_fedavg takes the list of all classes from private data, which "
            "no guarantee covers; set purpose: simulation, or algorithm: dp_fedemb"
        )
    return run_attempt(context, step, train, root_key, rehearsed=algorithm != "dp_fedavg")


def train(attempt: Attempt, users: VerifiedFolder) -> Trained:
    """Runs the rounds that are not committed yet, and recomputes two of them."""
    config, training, store = attempt.config, attempt.config.training, UserStore(users)
    classes = all_classes(store) if training.algorithm == "dp_fedavg" else None
    by_unit, alone = training.algorithm == "dp_sgd", config.mechanism.samples_images
    most = training.local.max_examples_per_client
    if alone or training.algorithm == "dp_covariance":
        most = config.partition.max_images_per_user
    elif by_unit:
        most = training.unit_gradient.images_per_unit
    loader = ClientLoader(store, config.model, max_examples=most, one_image=alone, classes=classes)
    function, trunk = attempt.rounds or build_rounds(
        attempt.backbone,
        attempt.mechanism,
        config.model,
        training,
        workers=attempt.workers.number,
        devices=attempt.workers.devices,
        shared_head_rows=0 if classes is None else max(1, len(classes)),
    )
    if trunk is None:
        return Trainer(attempt, users, function, loader.load).train()
    cache = FeatureCache(trunk, rows_of if by_unit else plain_rows)
    progress = FeatureProgress.of(attempt.mechanism.plan)
    if by_unit or training.algorithm == "dp_covariance":
        return Trainer(attempt, users, function, *_by_unit(cache, loader.load, progress)).train()
    frozen = FrozenFeatures(cache, loader.load, most)
    prepare = partial(frozen.fill, progress=progress)
    return Trainer(attempt, users, function, frozen.load, prepare).train()


def _by_unit(
    cache: FeatureCache,
    load: Callable[[VirtualClient], ClientExamples],
    progress: FeatureProgress,
) -> tuple[Callable[[VirtualClient], Unit], Callable[[Sequence[VirtualClient]], None]]:
    """Returns readers of the features of one unit, and of all units of a round."""

    def features(client: VirtualClient) -> Unit:
        return cache.of(unit_key(client), partial(load, client))

    def fill(clients: Sequence[VirtualClient]) -> None:
        cache.fill(((unit_key(client), partial(load, client)) for client in clients), progress)

    return features, fill
