"""Evaluates a model on held-out users.

Evaluates the trained model, its public backbone, an untrained model, raw pixels (embeddings) and,
if configured, the previous release and (in simulations) a model trained centrally without privacy
(the utility drop), all on the same images. All figures are exact over held-out users, whom the
guarantee does not cover; the report states it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from kfp import dsl

from fedemb.config import RunConfig
from fedemb.config.run import config_digest
from fedemb.data.client_data import UserStore
from fedemb.documents.artifacts import Public
from fedemb.documents.utility import (
    AnyUtility,
    ClassifierReport,
    UtilityReport,
    embedding_space_id,
    rate_name,
)
from fedemb.errors import FedEmbError
from fedemb.evaluation.classification import measure_classifiers
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
from fedemb.ledger import mark_high_water
from fedemb.models.backbone_files import load_backbone
from fedemb.models.inference import classify, embed
from fedemb.models.keras_backend import Model, load_keras
from fedemb.release.bundle import read_release
from fedemb.reports.pages import utility_page
from fedemb.reports.utility_text import utility_sentence
from fedemb.runtime.private_inputs import open_private
from fedemb.runtime.signed_inputs import read_model, read_public_backbone, read_users
from fedemb.runtime.step import Rights, step
from fedemb.runtime.step_context import StepContext
from fedemb.training.central import train_without_privacy


@step(
    image="trainer",
    resources="embed",
    outputs={"utility_report": Public, "utility_page": Public, "metrics": Public, "roc": Public},
    rights=Rights(
        private={"evaluation": "read", "users": "read"},  # users: the baseline of a simulation
        ledger="append",  # each evaluation is a record
        signing=("evaluate",),
        # Checks evaluation people against their commitment, and marks the record.
        keys={"ledger": "create", "policy": "read"},
        releases="read",
    ),
)
def evaluate_model(
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
    """Measures the model on people who never trained."""
    from fedemb.runtime.step import step_process

    with step_process("evaluate_model", locals()) as context:
        # Inside: what TensorFlow writes when it is loaded goes nowhere.
        from fedemb.documents.utility import UtilityReport
        from fedemb.reports.headline import utility_figures
        from fedemb.steps.evaluate_model import run

        report = run(context).body
        for name, value in utility_figures(report).items():
            metrics.log_metric(name, value)
        if isinstance(report, UtilityReport):
            for rate, recall in report.recall_at_far.items():
                metrics.log_metric(f"recall_at_far_{rate}", recall.value)
            if report.measured:
                roc.log_roc_curve(report.roc.far, report.roc.recall, report.roc.threshold)
        utility_report.metadata["model_sha"] = report.model_sha


_log = logging.getLogger(__name__)


def run(context: StepContext) -> Written[AnyUtility]:
    """Evaluates the model of a run on its held-out users and writes report and page.

    Args:
      context: reads `users`, `pretrained`, `model` and the evaluation users in the private root;
        writes `utility_report` and `utility_page`.

    Returns:
      The report. If too few users or identities were held out, its figures are missing; the run
      does not fail because of the data.

    Raises:
      ArtifactError: an artifact is missing, damaged, or of another run.
      PlanMismatch: the held-out users do not match the commitment of the run.
      LedgerError: the ledger lost a charge or an evaluation, see `ledger.root`.
      Refused: the run is not committed in the ledger, which counts the evaluation.
      SignatureInvalid: model, users, public backbone or previous release are not signed by the
          steps that write them.
      StorageError: the private root cannot be read.
      Superseded: the step was started again meanwhile.
    """
    config, artifacts = context.config, context.artifacts
    card = read_model(context)
    read_users(context)
    start = read_public_backbone(context)
    load_keras()
    models = models_of_run(config, artifacts)
    signer = Signer.current(context.keys, "evaluate", context.ledger.chain.trust)
    with ExitStack() as stack:
        earlier = config.evaluation.previous_release
        previous = stack.enter_context(read_release(context, earlier)) if earlier else None
        folder = stack.enter_context(open_private(context, "evaluation"))
        baseline = config.evaluation.centralized_baseline
        users = stack.enter_context(open_private(context, "users")) if baseline else None
        # Recorded after the users are verified and before any evaluation:
        evaluation = context.ledger.record_evaluation(context.run_id, card.weights_sha, signer)
        mark_high_water(context.ledger, context.keys)  # the next charge marks it at the anchor
        if users is not None:
            models["centralized"] = train_without_privacy(config, artifacts.pretrained, users)
        fields: Fields = {
            "run_id": context.run_id,
            "config_sha": config_digest(config, "evaluation"),
            "model_sha": card.weights_sha,
            "simulation": config.purpose == "simulation",
            "public_kind": config.pretraining.kind,
        }
        if config.task == "classification":
            fields["head_images"] = start.head_images
        report = _measured(config, UserStore(folder), models, previous, fields)
    context.ledger.check_latest_evaluation(evaluation)
    write_bytes(artifacts.utility_page, utility_page(report).encode())
    _log.info(events.MEASURED, utility_sentence(report))
    return write_signed(artifacts.utility_report, report, signer)


def _measured(
    config: RunConfig,
    store: UserStore,
    models: dict[str, Model],
    previous: Path | None,
    fields: Fields,
) -> AnyUtility:
    """Returns the report of `models`; `fields` identify run, configuration and model."""
    older = _previous(config, previous) if previous else None
    if config.task == "classification":
        models |= {"previous_release": older} if older else {}
        subjects, probabilities = apply_models(store, models, config, classify)
        return ClassifierReport.of_fields(fields | _classified(config, subjects, probabilities))
    subjects, embeddings = apply_models(store, models, config, embed)
    groups = subjects.groups if config.evaluation.resample_subgroups else None
    fields |= _embedded(config, subjects, embeddings)
    fields["embedding_space_id"] = embedding_space_id(str(fields["model_sha"]), config.model)
    fields["bootstrap"] = {
        "samples": config.evaluation.bootstrap_samples,
        "unit": subjects.identity_kind,
        "groups": None if groups is None else len(np.unique(groups)),
    }
    fields["previous_release"] = None
    if previous and subjects.measurable:
        sha = file_digest(previous)
        gallery = older and apply_models(store, {"old": older}, config, embed)[1]["old"]
        fields["previous_release"] = _compared_with_previous(
            config, sha, subjects, embeddings["model"], gallery
        )
    return UtilityReport.of_fields(fields)


def _previous(config: RunConfig, path: Path) -> Model | None:
    """Loads the model of an earlier release; None if its images or outputs differ."""
    try:
        return load_backbone(path, config.model)
    except FedEmbError as error:
        _log.warning(events.NOT_COMPARABLE, error)
        return None


def _compared_with_previous(
    config: RunConfig,
    old_sha: str,
    subjects: Subjects,
    embeddings: np.ndarray,
    gallery: np.ndarray | None,
) -> JsonFields:
    """Measures `embeddings` [n, dim] as queries against `gallery`, those of the previous release.

    Without a gallery, the previous release cannot be compared.
    """
    if gallery is None:
        figures = ("old_embedding_space_id", "old", "new_against_old", "change")
        return {"old_model_sha": old_sha, **dict.fromkeys(figures)}
    new = measure(subjects, embeddings, config.evaluation)
    before = measure(subjects, gallery, config.evaluation)
    crossed = measure(subjects, embeddings, config.evaluation, gallery=gallery)
    return {
        "old_model_sha": old_sha,
        "old_embedding_space_id": embedding_space_id(old_sha, config.model),
        "old": before.to_json(),
        "new_against_old": crossed.to_json(),
        "change": differences(new, before),
    }


def _classified(
    config: RunConfig, subjects: Subjects, probabilities: Mapping[str, np.ndarray]
) -> Fields:
    """Returns the measured fields of a classifier; their values are missing without images."""
    compared = (*ClassifierReport.baselines, "centralized", "previous_release")
    parts = ("model", *compared, "reliability", "confusion", "by_class", "by_group")
    found: Fields = {
        "bootstrap_samples": config.evaluation.bootstrap_samples,
        "unit": config.policy.unit,
        "classes": len(config.model.classes),
        **dict.fromkeys(parts),
        "images": 0,
        "units": 0,
    }
    if not len(subjects.labels):
        return found
    return found | measure_classifiers(
        probabilities,
        subjects,
        config.model.classes,
        samples=config.evaluation.bootstrap_samples,
        grouped=config.data.source.columns.subgroup is not None,
    )


def _embedded(config: RunConfig, subjects: Subjects, embeddings: dict[str, np.ndarray]) -> Fields:
    """Returns the measured fields of embeddings."""
    names = (*UtilityReport.baselines, "centralized")
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
