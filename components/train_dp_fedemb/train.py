"""The private rounds of DP-FedEmb: virtual clients train locally, their updates are summed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from fedemb.config import RunConfig
from fedemb.data.client_data import UserStore
from fedemb.data.verified_folder import VerifiedFolder
from fedemb.engine.backend_rounds import client_rounds, covariance_rounds
from fedemb.engine.feature_cache import FeatureProgress, FrozenFeatures, UnitFeatures, plain_rows
from fedemb.engine.rounds import ClientExamples
from fedemb.errors import ConfigError
from fedemb.foundation.canonical_json import JsonObject
from fedemb.models.arrays import Model
from fedemb.privacy.queries import Mechanism
from fedemb.runtime.step_context import StepContext
from fedemb.steps.train_dp_fedemb import centralized
from fedemb.training.attempt import Attempt, Rounds, Trained, run_attempt
from fedemb.training.client_loader import ClientLoader, all_classes
from fedemb.training.trainer import Trainer, train_on_features

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


def _rounds(  # noqa: PLR0917 - as `Rounds` has them
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
        return Trained(state=centralized.train(attempt, users), audit=None)
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
        centralized.require_no_privacy(config)
    if algorithm == "dp_fedavg" and config.purpose != "simulation":
        raise ConfigError(
            "training.algorithm=dp_fedavg takes the list of all classes from private data, which "
            "no guarantee covers; set purpose: simulation, or algorithm: dp_fedemb"
        )
