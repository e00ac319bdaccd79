"""Measures the incompatibility of a new model with the embeddings of the previous release."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np

from fedemb.config import RunConfig
from fedemb.data.client_data import UserStore
from fedemb.documents.utility import embedding_space_id
from fedemb.errors import FedEmbError
from fedemb.evaluation.held_out import Subjects, apply_models
from fedemb.foundation import step_logging as events
from fedemb.foundation.canonical_json import JsonFields
from fedemb.foundation.digests import file_digest
from fedemb.models.inference import embed
from fedemb.models.loading import load_backbone
from fedemb.steps.evaluate_embeddings.measure import differences, measure

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
