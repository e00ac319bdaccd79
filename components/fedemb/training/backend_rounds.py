"""Creates the training rounds of a configuration on its backend, and rehearses a run.

A rehearsal on generated images comes before the charge: what fails there costs no budget.
"""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from fedemb.config import ModelConfig, RunConfig, TrainingConfig
from fedemb.errors import ConfigError, FedEmbError
from fedemb.foundation.canonical_json import json_digest
from fedemb.models.backbone_files import load_backbone, save_backbone
from fedemb.models.backbones import cut, trainable_variables, with_bfloat16, without_head
from fedemb.models.inference import classify, embed
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
from fedemb.training.heads import CovarianceFunction, HeadGradientFunction, LeastSquaresFunction
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
        kind = LeastSquaresFunction if mechanism.plan.solves == "head" else HeadGradientFunction
        return kind(model, mechanism, training.unit_gradient), without_head(model)
    if training.algorithm == "dp_covariance":
        trunk, projection = cut(model, settings.trainable)
        return CovarianceFunction(projection, mechanism), trunk
    if not by_unit and keeps_features(settings, training.local):
        trunk, model = cut(model, settings.trainable)
    variables, seed = trainable_variables(model, settings.trainable), training.seed
    unit = training.unit_gradient
    if by_unit and on_jax:
        from fedemb.training.jax_rounds import JaxUnitGradientFunction

        return JaxUnitGradientFunction(model, mechanism, unit, variables=variables, seed=seed), None
    if by_unit:
        on_units = UnitGradientFunction(
            model, mechanism, unit, variables=variables, seed=seed, workers=workers, devices=devices
        )
        return on_units, None
    if on_jax:
        from fedemb.training.jax_clients import JaxRoundFunction

        make = partial(JaxRoundFunction, parallel_clients=training.parallel_clients)
    else:
        make = partial(RoundFunction, workers=workers, devices=devices)
    made, rows = (model, mechanism, training.local), shared_head_rows
    return make(*made, variables=variables, seed=seed, shared_head_rows=rows), trunk


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
    if algorithm in ("dp_sgd", "dp_covariance"):
        return _by_unit(cache, load)
    frozen = FrozenFeatures(cache, load, most_examples(config))
    return frozen.load, frozen.fill


def _by_unit(cache: FeatureCache, load: Callable[[VirtualClient], ClientExamples]) -> Readers:
    """Returns readers of the features of one unit, and of all units of a round."""

    def features(client: VirtualClient) -> Unit:
        return cache.of(unit_key(client), partial(load, client))

    def fill(clients: Sequence[VirtualClient]) -> None:
        cache.fill((unit_key(client), partial(load, client)) for client in clients)

    return features, fill


_MOST = 64
"""Maximum number of images of the generated unit."""


def rehearse(config: RunConfig, plan: MechanismPlan, start: Path) -> None:
    """Trains one round with a key of its own, embeds images, and saves and loads the model.

    The round has one unit of at most 64 images, so the memory of larger units is not rehearsed.

    Args:
      config: configuration of the run.
      plan: its mechanism.
      start: `backbone.keras` of the public backbone.

    Raises:
      FedEmbError: what training or evaluation would raise whatever the images are.
    """
    try:
        _rehearse(config, plan, start)
    except FedEmbError as error:
        raise type(error)(f"{error} Nothing was charged: this was a rehearsal.") from error
    except Exception as error:  # of the backend: no memory, or an operation that is not there
        raise ConfigError(
            f"A rehearsal of one round on generated images failed on this device "
            f"({type(error).__name__}: {str(error)[:300]}). Nothing was charged. Use smaller "
            "batches, another backend or another device."
        ) from error


def _rehearse(config: RunConfig, plan: MechanismPlan, start: Path) -> None:
    model, training = config.model, config.training
    use_backend(training.backend)
    load_keras()
    on_jax = training.backend == "jax"
    backbone = load_backbone(start, model)
    mechanism = build_mechanism(plan, secrets.token_bytes(32), "rehearsal", 1, json_digest({}))
    function, trunk = build_rounds(
        backbone,
        mechanism,
        model,
        training,
        workers=1 if on_jax else configure_threads(training.parallel_clients),
        devices=None if on_jax else accelerators(),
    )
    random, count = np.random.default_rng(0), min(_MOST, most_examples(config))
    shape = (count, model.image_size, model.image_size, model.channels)
    images = random.integers(0, 256, shape, np.uint8)
    labels = np.arange(count) % max(2, len(model.classes))
    load, _ = unit_readers(
        config, trunk, lambda client: ClientExamples(0, client.group, images, labels)
    )
    state = initial_state(function.initial_weights())
    slabs = function.slabs([load(VirtualClient(0, 0, np.zeros(1, np.int64)))], 0)
    output = mechanism.aggregate(0, function.run(state.weights, slabs).total)
    state = function.advance(training.server, state, output.mean)
    variables = trainable_variables(backbone, model.trainable)
    assign_weights(variables, released_weights(training.server, state))
    (classify if model.classes else embed)(backbone, images, config.evaluation.batch_size)
    with tempfile.TemporaryDirectory(prefix="fedemb-rehearsal-") as folder:
        saved = Path(folder, "backbone.keras")
        save_backbone(plain_form(backbone), saved)
        load_backbone(saved, model)
