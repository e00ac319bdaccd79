"""Evaluates the embeddings of a model on held-out identities.

Evaluates the trained model, its public backbone, an untrained model and raw pixels on the same
held-out users and, in simulations, a backbone trained centrally without privacy (the utility drop).
All figures are exact over held-out users, whom the guarantee does not cover; the report states it.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from kfp import dsl

from fedemb.config import RunConfig
from fedemb.config.run import config_digest
from fedemb.data.client_data import UserStore
from fedemb.documents.artifacts import Public
from fedemb.documents.utility import UtilityReport, embedding_space_id, rate_name
from fedemb.errors import FedEmbError
from fedemb.evaluation.held_out import (
    Subjects,
    apply_models,
    by_subgroup,
    differences,
    measure,
    models_of_run,
    roc_points,
)
from fedemb.foundation import step_logging as events
from fedemb.foundation.canonical_json import JsonFields, file_digest
from fedemb.foundation.document import Fields, Written
from fedemb.foundation.files import write_bytes
from fedemb.keys.trust import Signer, write_signed
from fedemb.models.backbone_files import load_backbone
from fedemb.models.inference import embed
from fedemb.models.keras_backend import load_keras
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
    task="embedding",
    resources="embed",
    outputs={
        "utility_report": Public,
        "utility_page": Public,
        "metrics": Public,
        "roc": Public,
    },
    rights=Rights(
        private={"evaluation": "read", "users": "read"},  # users: the baseline of a simulation
        ledger="append",  # each evaluation is a record
        signing=("evaluate",),
        keys={"policy": "read"},  # checks evaluation people against their commitment
        releases="read",
    ),
)
def evaluate_embeddings(
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
    roc: dsl.Output[dsl.ClassificationMetrics],
):
    """Measures verification and retrieval on identities that never trained."""
    from fedemb.reports.headline import utility_figures
    from fedemb.runtime.step import step_process
    from fedemb.steps.evaluate_embeddings import run

    with step_process("evaluate_embeddings", locals()) as context:
        report = run(context).body
        for rate, recall in report.recall_at_far.items():
            metrics.log_metric(f"recall_at_far_{rate}", recall.value)
        for name, value in utility_figures(report).items():
            metrics.log_metric(name, value)
        if report.measured:
            roc.log_roc_curve(report.roc.far, report.roc.recall, report.roc.threshold)
        utility_report.metadata["model_sha"] = report.model_sha


_log = logging.getLogger(__name__)


def compare_with_previous(
    config: RunConfig, old: Path, store: UserStore, subjects: Subjects, embeddings: np.ndarray
) -> JsonFields:
    """Measures `embeddings` [n, dim] as queries against a gallery of the previous release `old`."""
    old_sha = file_digest(old)
    try:
        backbone = load_backbone(old, config.model)
    except FedEmbError as error:
        _log.warning(events.NOT_COMPARABLE, error)
        figures = ("old_embedding_space_id", "old", "new_against_old", "change")
        return {"old_model_sha": old_sha, **dict.fromkeys(figures)}
    _, gallery = apply_models(store, {"old": backbone}, config, embed)
    new = measure(subjects, embeddings, config.evaluation)
    before = measure(subjects, gallery["old"], config.evaluation)
    crossed = measure(subjects, embeddings, config.evaluation, gallery=gallery["old"])
    return {
        "old_model_sha": old_sha,
        "old_embedding_space_id": embedding_space_id(old_sha, config.model),
        "old": before.to_json(),
        "new_against_old": crossed.to_json(),
        "change": differences(new, before),
    }


logger = logging.getLogger(__name__)


def run(context: StepContext) -> Written[UtilityReport]:
    """Evaluates the model of a run on its held-out identities and writes report and page.

    Args:
      context: reads `users`, `pretrained`, `model` and the evaluation users in the private root;
        writes `utility_report` and `utility_page`.

    Returns:
      The report. If too few identities were held out, `evaluated` is None and the figures are
      missing; the run does not fail because of the data.

    Raises:
      ArtifactError: an artifact is missing, damaged, or of another run.
      PlanMismatch: the held-out users do not match the commitment of the run.
      Refused: the run is not committed in the ledger, which counts the evaluation.
      SignatureInvalid: model, users, public backbone or previous release are not signed by the
          steps that write them.
      StorageError: the private root cannot be read.
      Superseded: the step was started again meanwhile.
    """
    config, run_id, artifacts = context.config, context.run_id, context.artifacts
    model = read_model(context)
    read_users(context)
    read_start(context)
    load_keras()
    backbones = models_of_run(config, artifacts)
    signer = Signer.current(context.keys, "evaluate", context.ledger.chain.trust)
    with ExitStack() as stack:
        earlier = config.evaluation.previous_release
        previous = earlier and stack.enter_context(read_release(context, earlier))
        folder = stack.enter_context(open_private(context, "evaluation"))
        baseline = config.evaluation.centralized_baseline
        users = stack.enter_context(open_private(context, "users")) if baseline else None
        # Recorded after the users are verified and before any evaluation:
        evaluation = context.ledger.record_evaluation(run_id, model.weights_sha, signer)
        store = UserStore(folder)
        if users is not None:
            pretrained = artifacts.pretrained
            backbones["centralized"] = train_without_privacy(config, pretrained, users)
        subjects, embeddings = apply_models(store, backbones, config, embed)
        fields = _evaluated_run(config, run_id, model.weights_sha)
        groups = subjects.groups if config.evaluation.resample_subgroups else None
        fields["bootstrap"] = {
            "samples": config.evaluation.bootstrap_samples,
            "unit": subjects.identity_kind,
            "groups": None if groups is None else len(np.unique(groups)),
        }
        fields |= _measure_all(config, subjects, embeddings)
        fields["previous_release"] = (
            compare_with_previous(config, previous, store, subjects, embeddings["model"])
            if previous and subjects.measurable
            else None
        )
    report = UtilityReport.of_fields(fields)
    context.ledger.check_latest_evaluation(evaluation)
    write_bytes(artifacts.utility_page, utility_page(report).encode())
    logger.info(events.MEASURED, utility_sentence(report))
    return write_signed(artifacts.utility_report, report, signer)


def _evaluated_run(config: RunConfig, run_id: str, weights_sha: str) -> Fields:
    """Returns the fields of the report that identify run, configuration and model."""
    return {
        "run_id": run_id,
        "config_sha": config_digest(config, "evaluation"),
        "model_sha": weights_sha,
        "embedding_space_id": embedding_space_id(weights_sha, config.model),
        "simulation": config.purpose == "simulation",
        "public_kind": config.pretraining.kind,
    }


def _measure_all(
    config: RunConfig, subjects: Subjects, embeddings: dict[str, np.ndarray]
) -> Fields:
    """Returns the measured part of the report."""
    names = (*UtilityReport.starts, "centralized")
    if not subjects.measurable:
        empty: dict[str, list[float]] = {"far": [], "recall": [], "threshold": []}
        figures = ("evaluated", "headline_rate", "retrieval", "utility_drop", "subgroups")
        return {"recall_at_far": {}, "roc": empty, **dict.fromkeys((*names, *figures))}
    measured = {
        name: measure(subjects, matrix, config.evaluation) for name, matrix in embeddings.items()
    }
    trained = measured["model"]
    part: Fields = {
        "headline_rate": rate_name(config.evaluation.false_accept_rates[0]),
        "evaluated": {
            "images": len(subjects.labels),
            "identities": len(np.unique(subjects.clusters)),
            "positive_pairs": trained.verification.positives,
            "negative_pairs": trained.verification.negatives,
        },
        **trained.to_json(),
        "roc": roc_points(trained.verification),
        "utility_drop": None,
        "subgroups": None,
    }
    for name in names:
        other = measured.get(name)
        part[name] = other and {
            **other.to_json(),
            "roc": roc_points(other.verification),
            "difference": differences(trained, other),
        }
    if "centralized" in measured:
        part["utility_drop"] = differences(measured["centralized"], trained)
    if config.data.source.columns.subgroup is not None:
        threshold = trained.verification.thresholds[0]
        model = embeddings["model"]
        part["subgroups"] = by_subgroup(subjects, model, config.evaluation, threshold)
    return part
