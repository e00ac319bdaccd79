"""A new model breaks the embeddings that are stored: how much, and which space is which."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np

from fedemb.config import RunConfig
from fedemb.data.client_data import UserStore
from fedemb.documents.artifacts import file_digest
from fedemb.documents.document import read
from fedemb.documents.model import ModelCard
from fedemb.documents.utility import embedding_space_id
from fedemb.embedding.inference import embed
from fedemb.embedding.loading import load_backbone
from fedemb.errors import FedEmbError
from fedemb.evaluation.held_out import Subjects, apply_models, backbone_of_release
from fedemb.steps.evaluate_embeddings.measure import differences, measure
from fedemb.storage import local_tree

_log = logging.getLogger(__name__)


def compare_with_previous(
    config: RunConfig, store: UserStore, subjects: Subjects, embeddings: np.ndarray
) -> dict[str, Any]:
    """Measures new queries against a gallery embedded by the previous release.

    Args:
      config: of the run; names the bundle.
      store: evaluation users.
      subjects: of the embeddings.
      embeddings: of the new model, [n, dim].

    Returns:
      `Previous` of the utility report.

    Raises:
      ArtifactError: the bundle holds no backbone.
      StorageError: it cannot be read.
    """
    uri = str(config.evaluation.previous_release)
    with local_tree(uri) as bundle:
        path = backbone_of_release(bundle)
        old_sha = _weights_sha(path)
        try:
            backbone = load_backbone(path, config.model)
        except FedEmbError as error:
            _log.warning("the previous release is not comparable: %s", error)
            figures = ("old_embedding_space_id", "old", "new_against_old", "change")
            return {"old_model_sha": old_sha, **dict.fromkeys(figures)}
        _, old = apply_models(store, {"old": backbone}, config, embed)
    new = measure(subjects, embeddings, config.evaluation)
    before = measure(subjects, old["old"], config.evaluation)
    crossed = measure(subjects, embeddings, config.evaluation, gallery=old["old"])
    return {
        "old_model_sha": old_sha,
        "old_embedding_space_id": embedding_space_id(old_sha, config.model),
        "old": before.to_json(),
        "new_against_old": crossed.to_json(),
        "change": differences(new, before),
    }


def _weights_sha(path: Path) -> str:
    described = path.parent / "model.json"
    if described.is_file():
        return read(described, ModelCard).body.weights_sha
    return file_digest(path)
