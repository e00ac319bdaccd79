"""The private rounds of DP-SGD: one mean gradient per unit (docs/explanation/dp_sgd.md)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from fedemb.config import RunConfig
from fedemb.data.client_data import UserStore
from fedemb.engine.backend_rounds import unit_rounds
from fedemb.engine.feature_cache import (
    FeatureCache,
    FeatureProgress,
    UnitFeatures,
    unit_key,
)
from fedemb.engine.training_round import TrainingRound
from fedemb.engine.units.head_gradient import HeadGradientFunction
from fedemb.engine.units.least_squares_head import LeastSquaresFunction
from fedemb.errors import ConfigError
from fedemb.models.backbones import with_bfloat16
from fedemb.models.classifier import without_head
from fedemb.privacy.randomness.sampling import VirtualClient
from fedemb.runtime.step_context import StepContext
from fedemb.training.attempt import run_attempt
from fedemb.training.client_loader import ClientLoader
from fedemb.training.trainer import Attempt, Trained, Trainer


def run(context: StepContext, *, root_key: bytes | None = None) -> dict[str, Any]:
    """Trains a classifier; arguments, result and errors are those of `run_attempt`.

    Raises:
      ConfigError: also raised if the configuration's task is not classification.
    """
    if context.config.task != "classification":
        raise ConfigError(
            f"task={context.config.task} is trained by train_dp_fedemb and not by this step; "
            "submit the pipeline dp-fedemb"
        )
    return run_attempt(context, "train_dp_sgd", _rounds, _train, root_key)


def _rounds(
    config: RunConfig, classifier: Any, mechanism: Any, workers: int, devices: Sequence[str] | None
) -> tuple[TrainingRound, Any]:
    training = config.training
    if config.model.trainable != "head":
        function = unit_rounds(
            classifier, mechanism, config.model, training, workers=workers, devices=devices
        )
        return function, None
    if training.mixed_precision:
        classifier = with_bfloat16(classifier)
    kind = LeastSquaresFunction if mechanism.plan.solves_head else HeadGradientFunction
    return kind(classifier, mechanism, training.unit_gradient), without_head(classifier)


def _train(attempt: Attempt) -> Trained:
    config, store = attempt.config, UserStore(attempt.users)
    alone = config.mechanism.samples_images
    of_unit = config.training.unit_gradient.images_per_unit
    most = config.partition.max_images_per_user if alone else of_unit
    loader = ClientLoader(store, config.model, max_examples=most, one_image=alone)
    assert attempt.rounds is not None, "rehearsed before the attempt was bound"
    function, trunk = attempt.rounds
    if trunk is None:
        return Trainer(attempt, function, loader.load).train()
    cache = FeatureCache(trunk, attempt.store, attempt.log.inputs_sha)

    progress = FeatureProgress.of(attempt.mechanism.plan)

    def features(client: VirtualClient) -> UnitFeatures:
        return cache.of(unit_key(client), partial(loader.load, client))

    def fill(clients: Sequence[VirtualClient]) -> None:
        cache.fill(
            ((unit_key(client), partial(loader.load, client)) for client in clients), progress
        )

    trained = Trainer(attempt, function, features, fill).train()
    cache.delete()
    return trained
