"""Trains an attempt with the algorithm of its configuration, on the examples that it reads."""

# The numeric libraries are not fully typed; the project's own signatures are checked.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from fedemb.config import RunConfig
from fedemb.data.client_data import UserStore, VerifiedFolder, load_examples
from fedemb.engine.backend_rounds import build_rounds
from fedemb.engine.central import train_centralized
from fedemb.engine.feature_cache import (
    FeatureCache,
    FeatureProgress,
    FrozenFeatures,
    open_features,
    plain_rows,
    rows_of,
    unit_key,
)
from fedemb.engine.rounds import ClientExamples, Unit
from fedemb.engine.server import ServerState, only_state
from fedemb.errors import ConfigError
from fedemb.foundation.canonical_json import JsonObject
from fedemb.models.public_features import without_public_features
from fedemb.privacy.running import RoundOutput, with_tags
from fedemb.privacy.sampling import VirtualClient
from fedemb.runtime.step_context import StepContext
from fedemb.training import working_state
from fedemb.training.attempt import Attempt, Trained, run_attempt
from fedemb.training.client_loader import ClientLoader, all_classes
from fedemb.training.trainer import Trainer
from fedemb.training.working_state import Progress


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
    if algorithm == "centralized":
        require_no_privacy(config)
    if algorithm == "dp_fedavg" and config.purpose != "simulation":
        raise ConfigError(
            "training.algorithm=dp_fedavg takes the list of all classes from private data, which "
            "no guarantee covers; set purpose: simulation, or algorithm: dp_fedemb"
        )
    from_data = algorithm in ("centralized", "dp_fedavg")
    return run_attempt(context, step, train, root_key, rehearsed=not from_data)


def train(attempt: Attempt, users: VerifiedFolder) -> Trained:
    """Runs the rounds that are not committed yet, and recomputes two of them."""
    config, training, store = attempt.config, attempt.config.training, UserStore(users)
    if training.algorithm == "centralized":
        return Trained(state=_pooled(attempt, store), audit=None)
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
    rows = rows_of if by_unit else plain_rows
    inputs_sha = attempt.inputs.inputs_sha
    cache = open_features(attempt.store, inputs_sha, trunk, loader.settings, rows)
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


def require_no_privacy(config: RunConfig) -> None:
    """Rejects pooled training under a plan that claims a guarantee.

    The baseline is one round without noise, so that plan, ledger and report state it: no noise, no
    bound, epsilon infinite.

    Raises:
      ConfigError: not a simulation, a private mechanism, several rounds, or a frozen backbone.
    """
    wanted = {
        "purpose": (config.purpose, "simulation"),
        "mechanism.kind": (
            config.mechanism.kind,
            "one without noise" if config.mechanism.private else config.mechanism.kind,
        ),
        "mechanism.rounds": (config.mechanism.rounds, 1),
        "model.trainable": (config.model.trainable, "all"),
    }
    for name, (found, needed) in wanted.items():
        if found != needed:
            raise ConfigError(
                f"training.algorithm=centralized needs {name}={needed}, got {found}. Set it. "
                "To compare with a private run, set evaluation.centralized_baseline in a "
                "simulation instead."
            )


def _pooled(attempt: Attempt, store: UserStore) -> ServerState:
    """Trains on all images at once, or reads the result of an earlier trainer of this attempt."""
    config, backbone, log = attempt.config, attempt.backbone, attempt.log

    def weights() -> np.ndarray:
        return np.concatenate([v.numpy().ravel() for v in backbone.trainable_variables])

    start, record = weights(), log.read(0)
    if record is None:
        images, labels = load_examples(
            store,
            np.arange(len(store)),
            max_examples=int(store.image_counts.sum()),
            image_size=config.model.image_size,
            channels=config.model.channels,
        )
        train_centralized(
            without_public_features(backbone),
            images,
            labels,
            config.training,
            epochs=config.evaluation.centralized_epochs,
        )
        moved = weights() - start
        digest = hashlib.sha256(moved.tobytes()).hexdigest()
        output = RoundOutput(moved, attempt.mechanism.plan.round_event, digest)
        record = log.commit(0, attempt.mechanism, output)
    state = only_state(config.training.server, start + record.mean)
    progress = Progress(state, with_tags(record.mechanism_state, ()))
    working_state.save_checkpoint(attempt.store, progress)
    return state
