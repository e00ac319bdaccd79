"""Evaluates the accuracy of a classifier on held-out users.

Evaluates the trained model, its public backbone, an untrained model and, if configured, the
previous release and (in simulations) a model trained without privacy, all on the same held-out
images. All figures are exact over held-out users, whom the guarantee does not
cover; the report states it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
from kfp import dsl

from fedemb.config import RunConfig
from fedemb.config.run import config_digest
from fedemb.data.client_data import UserStore
from fedemb.documents.artifacts import Public
from fedemb.documents.utility import ClassifierReport
from fedemb.errors import FedEmbError
from fedemb.evaluation.classification import measure_classifiers
from fedemb.evaluation.held_out import (
    Subjects,
    apply_models,
    models_of_run,
)
from fedemb.foundation import step_logging as events
from fedemb.foundation.document import Fields, Written
from fedemb.foundation.files import write_bytes
from fedemb.keys.trust import Signer, write_signed
from fedemb.models.backbone_files import load_backbone
from fedemb.models.inference import classify
from fedemb.models.keras_backend import Model, load_keras
from fedemb.release.bundle import read_release
from fedemb.reports.measured_words import utility_sentence
from fedemb.reports.pages import utility_page
from fedemb.runtime.private_inputs import open_private
from fedemb.runtime.signed_inputs import read_model, read_start, read_users
from fedemb.runtime.step import Rights, step
from fedemb.runtime.step_context import StepContext
from fedemb.training.central import train_without_privacy


@step(
    image="trainer",
    task="classification",
    resources="embed",
    outputs={"utility_report": Public, "utility_page": Public, "metrics": Public},
    rights=Rights(
        private={"evaluation": "read", "users": "read"},  # users: the baseline of a simulation
        ledger="append",
        signing=("evaluate",),
        keys={"policy": "read"},  # checks evaluation people against their commitment
        releases="read",
    ),
)
def evaluate_classifier(
    config: str,
    run_id: str,
    private_root: str,
    ledger: str,
    keys: str,
    users: dsl.Input[dsl.Dataset],
    pretrained: dsl.Input[dsl.Model],
    model: dsl.Input[dsl.Model],
    utility_report: dsl.Output[dsl.Artifact],
    utility_page: dsl.Output[dsl.HTML],
    metrics: dsl.Output[dsl.Metrics],
):
    """Measures how often the classifier is right on people who never trained."""
    from fedemb.reports.headline import utility_figures
    from fedemb.runtime.step import step_process

    with step_process("evaluate_classifier", locals()) as context:
        # Inside: what TensorFlow writes when it is loaded goes nowhere.
        from fedemb.steps.evaluate_classifier import run

        report = run(context).body
        for name, value in utility_figures(report).items():
            metrics.log_metric(name, value)
        utility_report.metadata["model_sha"] = report.model_sha


_COMPARED = (*ClassifierReport.starts, "centralized", "previous_release")
_LOG = logging.getLogger(__name__)


def run(context: StepContext) -> Written[ClassifierReport]:
    """Evaluates the model of a run on its held-out users and writes report and page.

    Args:
      context: reads `users`, `pretrained`, `model` and the evaluation users in the
        private root; writes `utility_report` and `utility_page`.

    Returns:
      The report. If no user was held out, its figures are missing; the run does not fail because of
      the data.

    Raises:
      ArtifactError: an artifact is missing, damaged, or of another run.
      PlanMismatch: the held-out users do not match the commitment of the run.
      Refused: the run is not committed in the ledger, which counts the evaluation.
      SignatureInvalid: model, users, public backbone or previous release are not signed
          by the steps that write them.
      StorageError: the private root cannot be read.
      Superseded: the step was started again meanwhile.
    """
    config, artifacts = context.config, context.artifacts
    card = read_model(context)
    read_users(context)
    read_start(context)
    load_keras()
    models = models_of_run(config, artifacts)
    signer = Signer.current(context.keys, "evaluate", context.ledger.chain.trust)
    with ExitStack() as stack:
        if config.evaluation.previous_release:
            release = read_release(context, config.evaluation.previous_release)
            models |= _previous(config, stack.enter_context(release))
        folder = stack.enter_context(open_private(context, "evaluation"))
        baseline = config.evaluation.centralized_baseline
        users = stack.enter_context(open_private(context, "users")) if baseline else None
        # Recorded after the users are verified and before any evaluation:
        evaluation = context.ledger.record_evaluation(context.run_id, card.weights_sha, signer)
        if users is not None:
            models["centralized"] = train_without_privacy(config, artifacts.pretrained, users)
        chances = partial(classify, temperature=config.model.temperature)
        subjects, probabilities = apply_models(UserStore(folder), models, config, chances)
    fields = {
        "run_id": context.run_id,
        "config_sha": config_digest(config, "evaluation"),
        "model_sha": card.weights_sha,
        "simulation": config.purpose == "simulation",
        "public_kind": config.pretraining.kind,
        "bootstrap_samples": config.evaluation.bootstrap_samples,
        "unit": config.policy.unit,
        "classes": len(config.model.classes),
        **_figures(config, subjects, probabilities),
    }
    report = ClassifierReport.of_fields(fields)
    context.ledger.check_latest_evaluation(evaluation)
    write_bytes(artifacts.utility_page, utility_page(report).encode())
    _LOG.info(events.MEASURED, utility_sentence(report))
    return write_signed(artifacts.utility_report, report, signer)


def _figures(
    config: RunConfig,
    subjects: Subjects,
    probabilities: Mapping[str, np.ndarray],
) -> Fields:
    """Returns the measured fields of the report; their values are missing without images."""
    parts = ("reliability", "confusion", "by_class", "by_group")
    nothing: Fields = {
        **dict.fromkeys(("model", *_COMPARED, *parts)),
        "images": 0,
        "units": 0,
    }
    if not len(subjects.labels):
        return nothing
    measured = measure_classifiers(
        probabilities,
        subjects,
        config.model.classes,
        samples=config.evaluation.bootstrap_samples,
        grouped=config.data.source.columns.subgroup is not None,
    )
    return nothing | measured


def _previous(config: RunConfig, path: Path) -> dict[str, Model]:
    """Loads the model of an earlier release; empty if its image format or classes differ."""
    try:
        return {"previous_release": load_backbone(path, config.model)}
    except FedEmbError as error:
        _LOG.warning(events.NOT_COMPARABLE, error)
        return {}
