"""Creates the training rounds of a configuration on its backend."""

from __future__ import annotations

from collections.abc import Sequence

from fedemb.config import ModelConfig, TrainingConfig
from fedemb.models.backbones import cut, trainable_variables, with_bfloat16, without_head
from fedemb.models.keras_backend import Model, Variable
from fedemb.models.public_features import without_public_features
from fedemb.privacy.running import Mechanism
from fedemb.training.feature_cache import keeps_features
from fedemb.training.heads import CovarianceFunction, HeadGradientFunction, LeastSquaresFunction
from fedemb.training.rounds import TrainingRound
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
    rounds = _client_rounds(
        *(model, mechanism, training, variables),
        workers=workers,
        devices=devices,
        shared_head_rows=shared_head_rows,
    )
    return rounds, trunk


def _client_rounds(
    model: Model,
    mechanism: Mechanism,
    training: TrainingConfig,
    variables: Sequence[Variable],
    *,
    workers: int,
    devices: Sequence[str] | None,
    shared_head_rows: int,
) -> TrainingRound:
    if training.backend == "jax":
        from fedemb.training.jax_clients import JaxRoundFunction

        return JaxRoundFunction(
            model,
            mechanism,
            training.local,
            variables=variables,
            seed=training.seed,
            parallel_clients=training.parallel_clients,
            shared_head_rows=shared_head_rows,
        )
    return RoundFunction(
        model,
        mechanism,
        training.local,
        variables=variables,
        seed=training.seed,
        workers=workers,
        devices=devices,
        shared_head_rows=shared_head_rows,
    )
