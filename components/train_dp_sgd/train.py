"""The private rounds of DP-SGD: each unit brings one mean gradient (docs/dp_sgd.md)."""

from __future__ import annotations

from typing import Any

from fedemb.data.client_data import UserStore
from fedemb.embedding.backbones import with_bfloat16
from fedemb.embedding.backend_rounds import unit_rounds
from fedemb.embedding.classifier import without_head
from fedemb.embedding.feature_cache import FeatureCache, UnitFeatures
from fedemb.embedding.head_gradient import HeadGradientFunction
from fedemb.embedding.least_squares_head import LeastSquaresFunction
from fedemb.errors import ConfigError
from fedemb.privacy.mechanisms.sampling import VirtualClient
from fedemb.step_context import StepContext
from fedemb.training.attempt import run_attempt
from fedemb.training.client_loader import ClientLoader
from fedemb.training.trainer import Attempt, Trained, Trainer


def run(context: StepContext, *, root_key: bytes | None = None) -> dict[str, Any]:
    """Trains a classifier; arguments, result and errors are those of `run_attempt`.

    Raises:
      ConfigError: besides, the configuration asks for embeddings.
    """
    if context.config.task != "classification":
        raise ConfigError(
            f"task={context.config.task} is trained by train_dp_fedemb and not by this step; "
            "submit the pipeline dp-fedemb"
        )
    return run_attempt(context, "train_dp_sgd", _train, root_key)


def _train(attempt: Attempt) -> Trained:
    config, training = attempt.config, attempt.config.training
    unit = training.unit_gradient
    store = UserStore(attempt.users)
    alone = config.mechanism.samples_images
    most = config.partition.max_images_per_user if alone else unit.images_per_unit
    loader = ClientLoader(store, config.model, max_examples=most, one_image=alone)
    if config.model.trainable == "head":
        half = training.mixed_precision
        classifier = with_bfloat16(attempt.backbone) if half else attempt.backbone
        cache = FeatureCache(without_head(classifier), attempt.store, attempt.log.inputs_sha)
        solves = attempt.mechanism.plan.solves_head
        kind = LeastSquaresFunction if solves else HeadGradientFunction
        head = kind(classifier, attempt.mechanism, unit)

        def features(client: VirtualClient) -> UnitFeatures:
            key = client.users.tobytes() + client.grouping.to_bytes(4, "big")
            return cache.of(key, lambda: loader.load(client))

        trained = Trainer(attempt, head, features).train()
        cache.delete()
        return trained
    function = unit_rounds(
        attempt.backbone,
        attempt.mechanism,
        config.model,
        training,
        workers=attempt.workers,
        devices=attempt.devices,
    )
    return Trainer(attempt, function, loader.load).train()
