"""The private rounds of DP-SGD: one mean gradient per unit (docs/explanation/dp_sgd.md)."""

from __future__ import annotations

from collections.abc import Sequence

from kfp import dsl

from fedemb.config import RunConfig
from fedemb.data.client_data import UserStore, VerifiedFolder
from fedemb.documents.artifacts import Noised
from fedemb.engine.backend_rounds import unit_rounds
from fedemb.engine.feature_cache import UnitFeatures
from fedemb.engine.rounds import ClientExamples
from fedemb.engine.units.head_gradient import HeadGradientFunction
from fedemb.engine.units.least_squares_head import LeastSquaresFunction
from fedemb.errors import ConfigError
from fedemb.foundation.canonical_json import JsonObject
from fedemb.models.arrays import Model
from fedemb.models.backbones import with_bfloat16
from fedemb.models.classifier import without_head
from fedemb.privacy.queries import Mechanism
from fedemb.runtime.step import Rights, step
from fedemb.runtime.step_context import StepContext
from fedemb.training.attempt import Attempt, Rounds, Trained, run_attempt
from fedemb.training.client_loader import ClientLoader
from fedemb.training.trainer import Trainer, train_on_features


@step(
    image="trainer",
    task="classification",
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
def train_dp_sgd(
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
    """Runs the rounds of DP-SGD; the output is the noised classifier and its public round log."""
    from fedemb.runtime.step import step_process

    with step_process("train_dp_sgd", locals()) as context:
        # Inside: what TensorFlow writes when it is loaded goes nowhere.
        from fedemb.steps.train_dp_sgd import run

        card = run(context)
        model.metadata.update(weights_sha=card["weights_sha"], rounds_run=card["rounds_run"])


STEP = "train_dp_sgd"


def run(context: StepContext, *, root_key: bytes | None = None) -> JsonObject:
    """Trains a classifier; arguments, result and errors are those of `run_attempt`.

    Raises:
      ConfigError: also raised if the configuration's task is not classification.
    """
    if context.config.task != "classification":
        raise ConfigError(
            f"task={context.config.task} is trained by train_dp_fedemb and not by this step; "
            "submit the pipeline dp-fedemb"
        )
    if context.config.model.trainable == "head":
        return run_attempt(context, STEP, _head_rounds, _train_head, root_key)
    return run_attempt(context, STEP, _unit_rounds, _train_units, root_key)


def _unit_rounds(
    config: RunConfig,
    classifier: Model,
    mechanism: Mechanism,
    workers: int,
    devices: Sequence[str] | None,
) -> Rounds[ClientExamples]:
    function = unit_rounds(
        classifier, mechanism, config.model, config.training, workers=workers, devices=devices
    )
    return function, None


def _head_rounds(
    config: RunConfig,
    classifier: Model,
    mechanism: Mechanism,
    workers: int,
    devices: Sequence[str] | None,
) -> Rounds[UnitFeatures]:
    del workers, devices  # one matrix product on the processor
    if config.training.mixed_precision:
        classifier = with_bfloat16(classifier)
    kind = LeastSquaresFunction if mechanism.plan.solves == "head" else HeadGradientFunction
    return kind(classifier, mechanism, config.training.unit_gradient), without_head(classifier)


def _loader(config: RunConfig, users: VerifiedFolder) -> ClientLoader:
    alone, unit = config.mechanism.samples_images, config.training.unit_gradient
    most = config.partition.max_images_per_user if alone else unit.images_per_unit
    return ClientLoader(UserStore(users), config.model, max_examples=most, one_image=alone)


def _train_units(attempt: Attempt[ClientExamples], users: VerifiedFolder) -> Trained:
    assert attempt.rounds is not None, "rehearsed before the attempt was bound"
    load = _loader(attempt.config, users).load
    return Trainer(attempt, users, attempt.rounds[0], load).train()


def _train_head(attempt: Attempt[UnitFeatures], users: VerifiedFolder) -> Trained:
    assert attempt.rounds is not None, "rehearsed before the attempt was bound"
    function, trunk = attempt.rounds
    assert trunk is not None, "a head trains on the features of a trunk"
    loader = _loader(attempt.config, users)
    cache = attempt.features.open(trunk, loader.settings)
    return train_on_features(attempt, users, function, cache, loader.load)
