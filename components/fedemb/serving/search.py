"""Searches stored photos by similarity: nearest embeddings, and a measured threshold."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedemb.documents.utility import UtilityReport
from fedemb.errors import InputError
from fedemb.foundation.document import read
from fedemb.foundation.extras import missing_extra
from fedemb.serving.embed_photos import read_embeddings
from fedemb.serving.released import ReleasedModel

_SAME = 0.9995
"""Similarity that is displayed as 1.000 or almost 1.000."""


class PhotoIndex:
    """Embeddings of one space, searchable for nearest neighbors by cosine (exact, FAISS)."""

    def __init__(self, embeddings: Path, model: ReleasedModel):
        """Reads a file that `fedemb embed` wrote.

        Raises:
          InputError: the file cannot be read.
          Refused: the file belongs to another model.
          ConfigError: FAISS is not installed.
        """
        try:
            import faiss
        except ModuleNotFoundError as error:
            raise (missing_extra(error) or error) from error
        self.names, vectors = read_embeddings(embeddings, model.space_id, model.width)
        self._model = model
        middle = vectors.mean(axis=0)
        self.least_similarity = float((vectors @ middle).min() / max(np.linalg.norm(middle), 1e-9))
        """Smallest similarity of a stored photo to the mean of all."""
        self._index = faiss.IndexFlatIP(model.width)
        self._index.add(np.ascontiguousarray(vectors))

    def nearest(self, photo: bytes, count: int) -> list[tuple[str, float]]:
        """Returns names and similarities of the nearest photos, best first.

        Raises:
          BadImageError: the photo cannot be read.
        """
        vector = self._model.embed(self._model.reader.read(photo)[None])
        found, places = self._index.search(vector, min(count, len(self.names)))
        return [(self.names[p], float(s)) for s, p in zip(found[0], places[0], strict=True)]


def collapsed(index: PhotoIndex, least: float) -> str:
    """Returns a warning if the model does not separate photos; else empty."""
    if least >= _SAME:
        return (
            "the model does not distinguish photos: pairs that do not belong together reach a "
            f"similarity of {least:.4f}, so none is marked as alike"
        )
    if len(index.names) > 1 and index.least_similarity >= _SAME:
        return (
            f"the model does not distinguish these {len(index.names):,} photos: all their "
            "embeddings are the same, so none is marked as alike"
        )
    return ""


def require_embeddings(model: ReleasedModel) -> None:
    """Rejects a classifier, because no similarity threshold was measured for its probabilities.

    Raises:
      InputError: the model is a classifier.
    """
    if model.config.model.classes:
        raise InputError(
            f"{model.bundle.name} is a classifier, but a search needs embeddings; use `fedemb "
            "embed` to write the probabilities of its classes"
        )


def threshold(bundle: Path, rate: str | None) -> tuple[str, float]:
    """Returns a measured false accept rate, by default the first, and its similarity threshold.

    Raises:
      InputError: the rate was not measured.
    """
    report = read(bundle / "utility_report.json", UtilityReport).body
    wanted = rate or report.headline_rate
    if wanted not in report.recall_at_far:
        raise InputError(
            f"the utility report has no threshold for the false accept rate {wanted}; use one of "
            f"{', '.join(report.recall_at_far) or 'an embedding release'}"
        )
    return wanted, report.recall_at_far[wanted].threshold
