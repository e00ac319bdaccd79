"""Creates the training rounds of a configuration on its backend."""

from __future__ import annotations

from collections.abc import Sequence

from fedemb.config import ModelConfig, TrainingConfig
from fedemb.engine.feature_cache import UnitFeatures, keeps_features
from fedemb.engine.rounds import ClientExamples, RoundFunction
from fedemb.engine.training_round import TrainingRound
from fedemb.engine.units.covariance_projection import CovarianceFunction
from fedemb.engine.units.unit_gradient import UnitGradientFunction
from fedemb.models.arrays import Model
from fedemb.models.backbones import cut, trainable_variables, with_bfloat16
from fedemb.models.public_features import without_public_features
from fedemb.privacy.queries import Mechanism


def client_rounds(
    backbone: Model,
    mechanism: Mechanism,
    model: ModelConfig,
    training: TrainingConfig,
    *,
    workers: int,
    devices: Sequence[str] | None = None,
    shared_head_rows: int = 0,
) -> tuple[TrainingRound[ClientExamples], Model | None]:
    """Returns the rounds of virtual clients.

    Args:
      backbone: `keras.Model` from `build_backbone`; not changed by rounds.
      mechanism: clips and rounds each update.
      model: selects the trained variables.
      training: backend, local training, seed.
      workers: TensorFlow only, see `RoundFunction`.
      devices: TensorFlow only; JAX uses all devices.
      shared_head_rows: DP-FedAvg, see `Objective`.

    Returns:
      The rounds, and the frozen trunk whose features replace images, or None.
    """
    trunk = None
    backbone = without_public_features(backbone)
    if training.mixed_precision:
        backbone = with_bfloat16(backbone)
    if keeps_features(model, training.local):
        trunk, backbone = cut(backbone, model.trainable)
    variables = trainable_variables(backbone, model.trainable)
    if training.backend == "jax":
        from fedemb.engine.jax.client_rounds import JaxRoundFunction

        function: TrainingRound[ClientExamples] = JaxRoundFunction(
            backbone,
            mechanism,
            training.local,
            variables=variables,
            seed=training.seed,
            parallel_clients=training.parallel_clients,
            shared_head_rows=shared_head_rows,
        )
    else:
        function = RoundFunction(
            backbone,
            mechanism,
            training.local,
            variables=variables,
            seed=training.seed,
            workers=workers,
            devices=devices,
            shared_head_rows=shared_head_rows,
        )
    return function, trunk


def covariance_rounds(
    backbone: Model, mechanism: Mechanism, model: ModelConfig, training: TrainingConfig
) -> tuple[TrainingRound[UnitFeatures], Model]:
    """Returns the only round of a projection solved from covariances, and the frozen trunk.

    Args:
      backbone: `keras.Model` from `build_backbone`; not changed by rounds.
      mechanism: of kind covariance.
      model: selects the projection.
      training: precision of the trunk.
    """
    backbone = without_public_features(backbone)
    if training.mixed_precision:
        backbone = with_bfloat16(backbone)
    trunk, projection = cut(backbone, model.trainable)
    return CovarianceFunction(projection, mechanism), trunk


def unit_rounds(
    classifier: Model,
    mechanism: Mechanism,
    model: ModelConfig,
    training: TrainingConfig,
    *,
    workers: int,
    devices: Sequence[str] | None = None,
) -> TrainingRound[ClientExamples]:
    """Returns the rounds of unit gradients.

    Args:
      classifier: `keras.Model` from `build_classifier`; not changed by rounds.
      mechanism: clips and rounds each record.
      model: selects the trained variables.
      training: backend, units, seed.
      workers: TensorFlow only.
      devices: TensorFlow only.
    """
    if training.mixed_precision:
        classifier = with_bfloat16(classifier)
    variables = trainable_variables(classifier, model.trainable)
    if training.backend == "jax":
        from fedemb.engine.jax.unit_gradient import JaxUnitGradientFunction

        return JaxUnitGradientFunction(
            classifier, mechanism, training.unit_gradient, variables=variables, seed=training.seed
        )
    return UnitGradientFunction(
        classifier,
        mechanism,
        training.unit_gradient,
        variables=variables,
        seed=training.seed,
        workers=workers,
        devices=devices,
    )
