"""Utility report: exact figures on held-out users, whom no guarantee covers."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import StringConstraints, model_validator

from fedemb.config import ModelConfig
from fedemb.documents.classifier import ClassifierReport
from fedemb.documents.fields import Count, Depth, Interval, Name, Rate, Sha, SubgroupName
from fedemb.documents.starts import OverStarts
from fedemb.foundation.canonical_json import json_digest
from fedemb.foundation.document import Document, Part

SpaceId = Annotated[str, StringConstraints(pattern=r"^es-[0-9a-f]{20}$")]


def embedding_space_id(weights_sha: str, model: ModelConfig) -> str:
    """Returns the ID of the embedding space. Store it with every embedding.

    Two embeddings are comparable only if their IDs are equal.
    """
    # A setting added later, at its default, must not change the ID of existing models.
    settings = model.model_dump(mode="json", exclude_defaults=True)
    return "es-" + json_digest({"weights_sha": weights_sha, "model": settings})[:20]


def rate_name(rate: float) -> str:
    """Returns the name of a false accept rate in reports: `0.001`."""
    return f"{rate:g}"


class Recall(Interval):
    """Recall at a false accept rate, and the threshold that gives it."""

    threshold: float


class Retrieved(Part):
    """Retrieval: each image is a query against all others; shares count queries with a match."""

    recall_at: dict[Depth, Interval]
    mean_average_precision: Interval
    nearest_neighbour: Interval
    queries: Count
    identities_with_match: Count | None
    """Number of identities with at least two images; None: not counted."""


class Figures(Part):
    """Figures of one model, or of one model's queries against another model's gallery."""

    recall_at_far: dict[Rate, Recall]
    retrieval: Retrieved


class Roc(Part):
    """ROC curve: one list per axis, all of the same length."""

    far: list[float]
    recall: list[float]
    threshold: list[float]


class Compared(Figures):
    """Another model on the same users, and the paired difference (this model minus it)."""

    roc: Roc
    difference: dict[Rate, Interval]


class Evaluated(Part):
    """Size of the evaluation."""

    images: Count
    identities: Count
    positive_pairs: Count
    negative_pairs: Count


class Subgroup(Part):
    """Users of one subgroup, at the subgroup's threshold and at the common threshold."""

    name: SubgroupName
    images: Count
    identities: Count
    recall_at_own_threshold: Interval
    recall_at_common_threshold: Interval | None
    false_accept_rate_at_common_threshold: Interval | None


class Subgroups(Part):
    """Subgroups, lowest figure first; those too small to be measured are only counted."""

    measured: list[Subgroup]
    too_small: Count


class Previous(Part):
    """New queries against a gallery embedded by the previous release."""

    old_model_sha: Sha
    old_embedding_space_id: SpaceId | None
    old: Figures | None
    new_against_old: Figures | None
    change: dict[Rate, Interval] | None
    """New against new, minus old against old. All fields None: the models are not comparable."""

    @property
    def comparable(self) -> bool:
        """Returns whether both models take the same images and have the same embedding length."""
        return self.old is not None


class Bootstrap(Part):
    """Settings of the bootstrap intervals."""

    samples: Count
    unit: Literal["user", "class"]
    groups: Count | None
    """Number of subgroups drawn before the units inside them; None: only units were drawn."""


class UtilityReport(Document, OverStarts):
    """Written by evaluate_embeddings."""

    kind: ClassVar[str] = "utility_report"
    role: ClassVar[str | None] = "evaluate"

    run_id: Name
    config_sha: Sha
    model_sha: Sha
    embedding_space_id: SpaceId
    simulation: bool
    public_kind: Name
    bootstrap: Bootstrap
    evaluated: Evaluated | None
    """Size of the evaluation; None: too few held-out identities, nothing was measured."""
    headline_rate: Rate | None
    """Headline false accept rate; None: nothing was measured."""
    recall_at_far: dict[Rate, Recall]
    retrieval: Retrieved | None
    roc: Roc
    public_backbone: Compared | None
    """Public backbone from which private training started."""
    frozen_features: Compared | None
    """Features below the projection, compared as if they were the embedding."""
    untrained: Compared | None
    raw_pixels: Compared | None
    """Raw images, compared as if they were embeddings."""
    centralized: Compared | None
    utility_drop: dict[Rate, Interval] | None
    """Recall of the centralized model minus recall of this model."""
    subgroups: Subgroups | None
    previous_release: Previous | None

    starts: ClassVar = ("public_backbone", "frozen_features", "untrained", "raw_pixels")

    @property
    def measured(self) -> bool:
        """Returns whether figures were measured."""
        return self.evaluated is not None

    @property
    def resampled(self) -> int:
        """Returns the number of identities, or groups of them, that intervals are drawn from."""
        measured = self.evaluated.identities if self.evaluated else 0
        return min(measured, self.bootstrap.groups or measured)

    @property
    def headline_words(self) -> str:
        """Returns the description of the headline figure."""
        return f"recall at false accept rate {self.headline_rate}"

    def headline(self, name: str = "model") -> Interval | None:
        """Returns the headline figure of this model or of a compared model."""
        part: UtilityReport | Compared | None = self if name == "model" else getattr(self, name)
        if part is None or self.headline_rate is None:
            return None
        return part.recall_at_far[self.headline_rate]

    def difference(self, name: str) -> Interval | None:
        """Returns the paired difference in the headline figure: this model minus another."""
        part: Compared | Previous | None = getattr(self, name)
        found = part.change if isinstance(part, Previous) else part and part.difference
        return found[self.headline_rate] if found and self.headline_rate else None

    @model_validator(mode="after")
    def _of_one_measurement(self) -> UtilityReport:
        if self.measured != bool(self.retrieval and self.headline_rate in self.recall_at_far):
            raise ValueError("some fields are measured and others are empty")
        for other in (*(getattr(self, name) for name in self.starts), self.centralized):
            if other is not None:
                _paired(self.recall_at_far, other.recall_at_far, other.difference)
                self._same_depths(other)
        previous = self.previous_release
        if previous is not None and (previous.old or previous.new_against_old or previous.change):
            if not (previous.old and previous.new_against_old and previous.change):
                raise ValueError(
                    "some fields of the previous release are measured and others are empty"
                )
            _paired(self.recall_at_far, previous.old.recall_at_far, previous.change)
            if previous.new_against_old.recall_at_far.keys() != self.recall_at_far.keys():
                raise ValueError("models are compared at rates at which they were not measured")
            self._same_depths(previous.old)
            self._same_depths(previous.new_against_old)
        return self

    def _same_depths(self, other: Figures) -> None:
        if self.retrieval is None or other.retrieval.recall_at.keys() != (
            self.retrieval.recall_at.keys()
        ):
            raise ValueError("models are compared at depths at which they were not measured")


AnyUtility = UtilityReport | ClassifierReport


def utility_kind(task: str) -> type[AnyUtility]:
    """Returns the document class of the artifact `utility_report`, by `RunConfig.task`."""
    return ClassifierReport if task == "classification" else UtilityReport


def _paired(
    ours: dict[str, Recall], theirs: dict[str, Recall], difference: dict[str, Interval]
) -> None:
    """Checks that a paired difference equals the difference of its values, as rounded."""
    if not ours.keys() == theirs.keys() == difference.keys():
        raise ValueError("models are compared at rates at which they were not measured")
    for rate, found in difference.items():
        if not abs(ours[rate].value - theirs[rate].value - found.value) < 2e-6:
            raise ValueError("a difference is not that of its two values")
