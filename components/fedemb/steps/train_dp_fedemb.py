"""The private rounds of DP-FedEmb: virtual clients train locally, their updates are summed."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from kfp import dsl

from fedemb.config import RunConfig
from fedemb.data.client_data import UserStore, VerifiedFolder, load_examples
from fedemb.documents.artifacts import Noised
from fedemb.engine.backend_rounds import client_rounds, covariance_rounds
from fedemb.engine.central import train_centralized
from fedemb.engine.feature_cache import FeatureProgress, FrozenFeatures, UnitFeatures, plain_rows
from fedemb.engine.rounds import ClientExamples
from fedemb.engine.server import ServerState, initial_state
from fedemb.errors import ConfigError
from fedemb.foundation.canonical_json import JsonObject
from fedemb.models.arrays import Model
from fedemb.models.public_features import without_public_features
from fedemb.privacy.queries import Mechanism
from fedemb.privacy.queries.running import with_tags
from fedemb.runtime.step import Rights, step
from fedemb.runtime.step_context import StepContext
from fedemb.training import checkpoint
from fedemb.training.attempt import Attempt, Rounds, Trained, run_attempt
from fedemb.training.checkpoint import Progress
from fedemb.training.client_loader import ClientLoader, all_classes
from fedemb.training.trainer import Trainer, train_on_features


def require_no_privacy(config: RunConfig) -> None:
    """Rejects pooled training under a plan that claims a guarantee.

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


def train(attempt: Attempt[ClientExamples], users: VerifiedFolder) -> ServerState:
    """Trains, or reads the result of an earlier trainer of this attempt from its record."""
    from fedemb.privacy.queries import RoundOutput

    config, backbone, log = attempt.config, attempt.backbone, attempt.log
    start = _flat(backbone)
    record = log.read(0)
    if record is None:
        pile = UserStore(users)
        images, labels = load_examples(
            pile,
            np.arange(len(pile)),
            max_examples=int(pile.image_counts.sum()),
            image_size=config.model.image_size,
            channels=config.model.channels,
        )
        epochs = config.evaluation.centralized_epochs
        train_centralized(
            without_public_features(backbone), images, labels, config.training, epochs=epochs
        )
        moved = _flat(backbone) - start
        digest = hashlib.sha256(moved.tobytes()).hexdigest()
        output = RoundOutput(moved, attempt.mechanism.plan.round_event, digest)
        record = log.commit(0, attempt.mechanism, output)
    server = config.training.server
    state = replace(initial_state(start), weights=start + record.mean, rounds=1)
    share = np.float32(1.0) - np.float32(server.ema_decay)  # average of one round
    state = replace(state, average=share * state.weights)
    checkpoint.save(attempt.store, Progress(state, with_tags(record.mechanism_state, ())))
    return state


def _flat(backbone: Model) -> np.ndarray:
    return np.concatenate([v.numpy().ravel() for v in backbone.trainable_variables])


@step(
    image="trainer",
    task="embedding",
    once=True,
    resources="train",
    outputs={"model": Noised},
    rights=Rights(
        private={
            "users": "read",
            "train": "write",
            "diagnostics": "write",
        },
        ledger="append",
        signing=("ledger", "trainer"),
        keys={"policy": "read", "reservation": "destroy"},
    ),
)
def train_dp_fedemb(
    config: str,
    run_id: str,
    private_root: str,
    ledger: str,
    keys: str,
    privacy_plan: dsl.Input[dsl.Artifact],
    reservation: dsl.Input[dsl.Artifact],
    users: dsl.Input[dsl.Dataset],
    pretrained: dsl.Input[dsl.Model],
    model: dsl.Output[dsl.Model],
):
    """Runs the private rounds; the output is the noised backbone and its public round log."""
    from fedemb.runtime.step import step_process

    with step_process("train_dp_fedemb", locals()) as context:
        card = run(context)
        model.metadata.update(weights_sha=card["weights_sha"], rounds_run=card["rounds_run"])


STEP = "train_dp_fedemb"


def run(context: StepContext, *, root_key: bytes | None = None) -> JsonObject:
    """Trains embeddings; arguments, result and errors are those of `run_attempt`.

    Raises:
      ConfigError: also raised for an algorithm without a guarantee, or that another step runs.
    """
    _check_algorithm(context.config)
    if context.config.training.algorithm == "dp_covariance":
        return run_attempt(context, STEP, _covariances, _train_covariance, root_key)
    known = context.config.training.algorithm == "dp_fedemb"
    rounds = _rounds if known else None
    return run_attempt(context, STEP, rounds, _train, root_key)


def _rounds(
    config: RunConfig,
    backbone: Model,
    mechanism: Mechanism,
    workers: int,
    devices: Sequence[str] | None,
    shared_head_rows: int = 0,
) -> Rounds[ClientExamples]:
    return client_rounds(
        backbone,
        mechanism,
        config.model,
        config.training,
        workers=workers,
        devices=devices,
        shared_head_rows=shared_head_rows,
    )


def _train(attempt: Attempt[ClientExamples], users: VerifiedFolder) -> Trained:
    config, training = attempt.config, attempt.config.training
    if training.algorithm == "centralized":
        return Trained(state=train(attempt, users), audit=None)
    store = UserStore(users)
    classes = all_classes(store) if training.algorithm == "dp_fedavg" else None
    most = training.local.max_examples_per_client
    loader = ClientLoader(store, config.model, max_examples=most, classes=classes)
    parts = (attempt.backbone, attempt.mechanism, attempt.workers.number, attempt.workers.devices)
    rows = 0 if classes is None else max(1, len(classes))
    function, trunk = attempt.rounds or _rounds(config, *parts, shared_head_rows=rows)
    if trunk is None:
        return Trainer(attempt, users, function, loader.load).train()
    cache = attempt.features.open(trunk, loader.settings, plain_rows)
    frozen = FrozenFeatures(cache, loader.load, most)
    progress = FeatureProgress.of(attempt.mechanism.plan)
    prepare = partial(frozen.fill, progress=progress)
    return Trainer(attempt, users, function, frozen.load, prepare).train()


def _covariances(
    config: RunConfig,
    backbone: Model,
    mechanism: Mechanism,
    workers: int,
    devices: Sequence[str] | None,
) -> Rounds[UnitFeatures]:
    del workers, devices  # one matrix product per user on the processor
    return covariance_rounds(backbone, mechanism, config.model, config.training)


def _train_covariance(attempt: Attempt[UnitFeatures], users: VerifiedFolder) -> Trained:
    assert attempt.rounds is not None, "rehearsed before the attempt was bound"
    function, trunk = attempt.rounds
    assert trunk is not None, "a projection is solved on the features of a trunk"
    config = attempt.config
    most = config.partition.max_images_per_user
    loader = ClientLoader(UserStore(users), config.model, max_examples=most)
    cache = attempt.features.open(trunk, loader.settings, plain_rows)
    return train_on_features(attempt, users, function, cache, loader.load)


def _check_algorithm(config: RunConfig) -> None:
    algorithm = config.training.algorithm
    if algorithm == "dp_sgd":
        raise ConfigError(
            "training.algorithm=dp_sgd is run by train_dp_sgd and not by this step; submit the "
            "pipeline dp-sgd"
        )
    if algorithm == "centralized":
        require_no_privacy(config)
    if algorithm == "dp_fedavg" and config.purpose != "simulation":
        raise ConfigError(
            "training.algorithm=dp_fedavg takes the list of all classes from private data, which "
            "no guarantee covers; set purpose: simulation, or algorithm: dp_fedemb"
        )
