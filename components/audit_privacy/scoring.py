"""Membership scores: one for embeddings, one for classifiers.

Embeddings: similarity among a user's images minus similarity to those of others (based on Li et
    al., arXiv 2203.02077). Classifiers: the model's confidence in the labels as log-odds, whose
    spread is similar for hard and easy images (Carlini et al., arXiv 2112.03570, section IV). Both
    are also compared with the scores under the public backbone, which removes the difficulty of a
    user (Watson et al., arXiv 2111.08440).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import numpy as np

from fedemb.config import RunConfig
from fedemb.documents.audit import Attack, attack_on
from fedemb.models.arrays import Model
from fedemb.steps.audit_privacy.attack import verification_scores

_TINY = 1e-30
"""Constant below every float32 probability, so that a class of probability 0 has finite odds."""


class Scoring(ABC):
    """Maps images to one score per user; a member should score higher."""

    attack: ClassVar[Attack]
    least_images: ClassVar[int]
    """Minimum number of images of a scored user."""

    @abstractmethod
    def outputs(
        self, model: Model, images: np.ndarray, labels: np.ndarray, batch: int
    ) -> np.ndarray:
        """Returns the model's output for each image, `[images, ...]`."""

    @abstractmethod
    def scores(self, seen: np.ndarray, owners: np.ndarray, users: int) -> np.ndarray:
        """Returns one score per user, float64 `[users]`.

        Args:
          seen: outputs of `outputs` for all images; finite.
          owners: int `[images]`, user of each image, 0..users-1.
          users: number of users.
        """

    @abstractmethod
    def made_up(
        self, random: np.random.Generator, users: int, images: int, leak: bool
    ) -> np.ndarray:
        """Simulates model outputs for synthetic users with or without a leak."""


class VerificationScore(Scoring):
    """Mean cosine within a user minus mean cosine to others."""

    attack = "verification_score"
    least_images = 2

    def outputs(
        self, model: Model, images: np.ndarray, labels: np.ndarray, batch: int
    ) -> np.ndarray:
        """Returns embeddings of unit length."""
        from fedemb.engine import embed

        return embed(model, images, batch)

    def scores(self, seen: np.ndarray, owners: np.ndarray, users: int) -> np.ndarray:
        """See `verification_scores`."""
        return verification_scores(seen, owners, users)

    def made_up(
        self, random: np.random.Generator, users: int, images: int, leak: bool
    ) -> np.ndarray:
        """Returns points around a centre; a leak moves them together."""
        centres = random.normal(size=(users, 1, 32))
        points = centres + (0.8 if leak else 1.0) * random.normal(size=(users, images, 32))
        points /= np.linalg.norm(points, axis=2, keepdims=True)
        return points.reshape(users * images, -1).astype(np.float32)


class ConfidenceScore(Scoring):
    """Mean log-odds of the label over a unit's images."""

    attack = "confidence_score"
    least_images = 1

    def outputs(
        self, model: Model, images: np.ndarray, labels: np.ndarray, batch: int
    ) -> np.ndarray:
        """Returns the log-odds of each image's label, float64 `[images]`."""
        from fedemb.models.inference import classify

        probabilities = classify(model, images, batch).astype(np.float64)
        wanted = labels[:, None] == np.arange(probabilities.shape[1])
        right = (probabilities * wanted).sum(1)
        wrong = (probabilities * ~wanted).sum(1)
        return np.log(right + _TINY) - np.log(wrong + _TINY)

    def scores(self, seen: np.ndarray, owners: np.ndarray, users: int) -> np.ndarray:
        """Returns the mean over each unit's images; NaN for a unit without images."""
        counts = np.bincount(owners, minlength=users)
        with np.errstate(invalid="ignore"):
            return np.bincount(owners, seen, minlength=users) / counts

    def made_up(
        self, random: np.random.Generator, users: int, images: int, leak: bool
    ) -> np.ndarray:
        """Returns easy and hard units; a leak makes the model more confident."""
        hard = random.normal(size=(users, 1)) + (1.0 if leak else 0.0)
        return (hard + random.normal(size=(users, images))).ravel()


def scoring_of(config: RunConfig) -> Scoring:
    """Returns the score for the run's task."""
    kinds = {kind.attack: kind for kind in (VerificationScore, ConfidenceScore)}
    return kinds[attack_on(config.task)]()
