"""Creates the training rounds of a configuration on its backend, and rehearses a run.

A rehearsal on generated images comes before the charge: what fails there costs no budget.
"""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fedemb.config import ModelConfig, RunConfig, TrainingConfig
from fedemb.documents.artifacts import RunArtifacts
from fedemb.errors import ConfigError, FedEmbError
from fedemb.evaluation.held_out import models_of_run
from fedemb.foundation.canonical_json import json_digest
from fedemb.models.backbone_files import load_backbone, save_backbone
from fedemb.models.backbones import cut, trainable_variables, with_bfloat16, without_head
from fedemb.models.inference import SharedFeatures, classify, embed
from fedemb.models.keras_backend import (
    Model,
    accelerators,
    configure_threads,
    load_keras,
    use_backend,
)
from fedemb.models.layers import plain_form
from fedemb.models.public_features import without_public_features
from fedemb.privacy.mechanism import MechanismPlan
from fedemb.privacy.running import Mechanism, build_mechanism
from fedemb.privacy.sampling import VirtualClient
from fedemb.training.feature_cache import (
    FeatureCache,
    FrozenFeatures,
    keeps_features,
    plain_rows,
    rows_of,
    unit_key,
)
from fedemb.training.heads import CovarianceFunction, HeadGradientFunction
from fedemb.training.rounds import ClientExamples, TrainingRound, Unit, assign_weights
from fedemb.training.server import initial_state, released_weights
from fedemb.training.tensorflow_clients import RoundFunction
from fedemb.training.units import UnitGradientFunction


def build_rounds(
    model: Model,
    mechanism: Mechanism,
    settings: ModelConfig,
    training: TrainingConfig,
    *,
    workers: int = 1,
    devices: Sequence[str] | None = None,
    shared_head_rows: int = 0,
) -> tuple[TrainingRound, Model | None]:
    """Returns the rounds of an algorithm.

    Args:
      model: backbone, or classifier for DP-SGD; not changed by rounds.
      mechanism: clips and rounds each record.
      settings: selects the trained variables.
      training: algorithm, backend, local training or units, seed.
      workers: TensorFlow only, see `RoundFunction`.
      devices: TensorFlow only; JAX uses all devices.
      shared_head_rows: DP-FedAvg, see `Objective`.

    Returns:
      The rounds, and the frozen trunk whose features replace images, or None.
    """
    by_unit, on_jax, trunk = training.algorithm == "dp_sgd", training.backend == "jax", None
    if not by_unit:
        model = without_public_features(model)
    if training.mixed_precision:
        model = with_bfloat16(model)
    if by_unit and settings.trainable == "head":
        head = HeadGradientFunction(model, mechanism, training.unit_gradient)
        return head, without_head(model)
    if training.algorithm == "dp_covariance":
        trunk, projection = cut(model, settings.trainable)
        return CovarianceFunction(projection, mechanism), trunk
    if not by_unit and keeps_features(settings, training.local):
        trunk, model = cut(model, settings.trainable)
    where: dict[str, Any] = {"workers": workers, "devices": devices}
    local: dict[str, Any] = {"config": training.local, "shared_head_rows": shared_head_rows}
    if by_unit and on_jax:
        from fedemb.training.jax_rounds import JaxUnitGradientFunction

        kind = partial(JaxUnitGradientFunction, config=training.unit_gradient)
    elif by_unit:
        kind = partial(UnitGradientFunction, config=training.unit_gradient, **where)
    elif on_jax:
        from fedemb.training.jax_clients import JaxRoundFunction

        kind = partial(JaxRoundFunction, **local, parallel_clients=training.parallel_clients)
    else:
        kind = partial(RoundFunction, **local, **where)
    variables = trainable_variables(model, settings.trainable)
    return kind(model, mechanism, variables=variables, seed=training.seed), trunk


def most_examples(config: RunConfig) -> int:
    """Returns the largest number of images of a unit that a round reads."""
    training = config.training
    if config.mechanism.samples_images or training.algorithm == "dp_covariance":
        return config.partition.max_images_per_user
    if training.algorithm == "dp_sgd":
        return training.unit_gradient.images_per_unit
    return training.local.max_examples_per_client


Readers = tuple[Callable[[VirtualClient], Unit], Callable[[Sequence[VirtualClient]], None] | None]
"""Reads one unit; and, if features are cached, computes those of all units of a round."""


def unit_readers(
    config: RunConfig, trunk: Model | None, load: Callable[[VirtualClient], ClientExamples]
) -> Readers:
    """Returns readers of units.

    Args:
      config: configuration of the run.
      trunk: frozen part whose features replace images, or None.
      load: reads the images of a unit.
    """
    algorithm = config.training.algorithm
    if trunk is None:
        return load, None
    cache = FeatureCache(trunk, rows_of if algorithm == "dp_sgd" else plain_rows)
    if algorithm not in ("dp_sgd", "dp_covariance"):
        frozen = FrozenFeatures(cache, load, most_examples(config))
        return frozen.load, frozen.fill

    def one(client: VirtualClient) -> tuple[bytes, Callable[[], ClientExamples]]:
        return unit_key(client), partial(load, client)

    return (lambda client: cache.of(*one(client))), (lambda clients: cache.fill(map(one, clients)))


_MOST = 64
"""Maximum number of images of a generated unit whose batches are smaller."""
Serve = Callable[[Model, RunConfig, Path], None]
"""Writes into a folder what a release adds to a model."""


def rehearse(config: RunConfig, plan: MechanismPlan, start: Path, serve: Serve) -> None:
    """Trains with a key of its own on generated images, then applies, saves and serves the models.

    The first and the last round run: rounds between them are like the first. Memory follows from
    the batches, which are full. Partition and documents depend on settings that the configuration,
    the plan or `check_before_charge` checked; those of evaluation, audit and release may change
    after the charge. A SavedModel is made in a process with TensorFlow only.

    Args:
      config: configuration of the run.
      plan: its mechanism.
      start: `backbone.keras` of the public backbone.
      serve: writes SavedModel and preprocessing.

    Raises:
      FedEmbError: what a later step would raise whatever the images are.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="fedemb-rehearsal-") as folder:
            saved = Path(folder)
            model = _train(config, plan, start)
            save_backbone(plain_form(model), saved / "backbone.keras")
            models = models_of_run(config, RunArtifacts(pretrained=start.parent, model=saved))
            apply = classify if config.model.classes else embed
            images = _images(config, config.evaluation.batch_size)
            SharedFeatures(models, config.model.trainable, apply)(images, len(images))
            if config.training.backend == "tensorflow":
                serve(models["model"], config, saved)
    except FedEmbError as error:
        raise type(error)(f"{error} Nothing was charged: this was a rehearsal.") from error
    except Exception as error:  # of the backend: no memory, or an operation that is not there
        raise ConfigError(
            f"A rehearsal of the run on generated images failed on this device "
            f"({type(error).__name__}: {str(error)[:300]}). Nothing was charged. Use smaller "
            "batches, another backend or another device."
        ) from error


def _images(config: RunConfig, count: int) -> np.ndarray:
    size, channels = config.model.image_size, config.model.channels
    return np.random.default_rng(0).integers(0, 256, (count, size, size, channels), np.uint8)


def _train(config: RunConfig, plan: MechanismPlan, start: Path) -> Model:
    """Returns the backbone after the first and the last round, with as many units as workers."""
    model, training = config.model, config.training
    use_backend(training.backend)
    load_keras()
    on_jax = training.backend == "jax"
    backbone = load_backbone(start, model)
    mechanism = build_mechanism(plan, secrets.token_bytes(32), "rehearsal", 1, json_digest({}))
    workers = 1 if on_jax else configure_threads(training.parallel_clients)
    devices = None if on_jax else accelerators()
    function, trunk = build_rounds(
        backbone, mechanism, model, training, workers=workers, devices=devices
    )
    images = _images(config, min(most_examples(config), max(_MOST, training.local.batch_size)))
    labels = np.arange(len(images)) % max(2, len(model.classes))
    load, _ = unit_readers(
        config, trunk, lambda client: ClientExamples(0, client.group, images, labels)
    )
    state = initial_state(function.initial_weights())
    units = [VirtualClient(0, group, np.array([group])) for group in range(workers)]
    for number in sorted({0, 0 if plan.tracks_participation else plan.rounds - 1}):
        sums = function(state.weights, map(load, units), number)
        output = mechanism.aggregate(number, sums.total)
        state = function.advance(training.server, replace(state, rounds=number), output.mean)
    variables = trainable_variables(backbone, model.trainable)
    assign_weights(variables, released_weights(training.server, state))
    return backbone
