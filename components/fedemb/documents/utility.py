"""Reports of utility: embeddings and classifiers measured on held-out users."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Annotated, ClassVar, Literal

from pydantic import StringConstraints, model_validator

from fedemb.config import ModelConfig, RunConfig
from fedemb.config.policy import Unit
from fedemb.documents.fields import (
    Code,
    Count,
    Depth,
    Interval,
    Name,
    Rate,
    Sha,
    Share,
    Spread,
    SubgroupName,
)
from fedemb.foundation.canonical_json import json_digest
from fedemb.foundation.document import Document, Part

LEAST_RESAMPLED = 6
"""Minimum number of identities or units for an interval. With five identities and no real gain, all
five gain by chance in 1 of 32 cases, and every resample of them shows a gain."""


def baselines_of(config: RunConfig) -> tuple[str, ...]:
    """Returns the baselines of a run's model, as field names of its utility report.

    The baselines are:

    - the public backbone that private training changes;
    - the frozen features under a projection, which starts as a random map of them;
    - the output of an imported network, if the configuration changes its features;
    - of an embedding, an untrained network, if the backbone is pretrained in this run (an imported
      one has the layers of its file, whatever the backbone name), and the raw pixels;
    - of a classifier, the most frequent class.
    """
    embeds = config.task == "embedding"
    imported = config.pretraining.kind == "import"
    others = {
        "frozen_features": embeds and config.model.trainable == "projection",
        "network_output": embeds and imported and config.model.changes_features,
        "untrained": embeds and config.pretraining.kind == "supervised",
        "raw_pixels": embeds,
        "most_frequent": not embeds,
    }
    return ("public_backbone", *(name for name, asked in others.items() if asked))


class WithBaselines(ABC):
    """Base of both utility reports: the paired gain over the best baseline."""

    baselines: ClassVar[tuple[str, ...]]
    """Fields of the baselines that need no private data; the first wins a tie."""

    @abstractmethod
    def headline(self, name: str = "model") -> Interval | None:
        """Returns the headline figure of this model or of a compared model."""

    @abstractmethod
    def difference(self, name: str) -> Interval | None:
        """Returns the paired difference in the headline figure: this model minus another."""

    @property
    def measured_baselines(self) -> dict[str, Interval]:
        """Returns the headline figure of each measured baseline."""
        return {name: found for name in self.baselines if (found := self.headline(name))}

    @property
    def best_baseline(self) -> str | None:
        """Returns the baseline with the highest figure; None: the public one was not measured."""
        found = self.measured_baselines
        if "public_backbone" not in found:
            return None
        return max(found, key=lambda name: found[name].value)

    @property
    def gain(self) -> Interval | None:
        """Returns the gain of private training: the model minus the best baseline, paired."""
        return self.difference(self.best_baseline) if self.best_baseline else None


class Classified(Part):
    """Figures of one model."""

    top_1: Interval
    """Share of images whose class is ranked first; ties count by their expected share."""
    top_5: Interval
    log_loss: Interval
    calibration_error: Share
    """Mean gap between confidence and accuracy, over 15 equal bins of confidence (ECE)."""
    calibration_interval: Spread | None
    """95 % interval of the draws, corrected for chance. Chance adds a gap in every bin, so that a
    calibrated model has an error above 0 and its draws are even larger. Near 0 the interval is too
    short."""


class ComparedClassifier(Classified):
    """Another model on the same images, and the paired top-1 difference (this model minus it)."""

    difference: Interval


class ComparedPart(Part):
    """Another model on the images of a class or group, and this model's paired gain over it.

    The negative gain over `centralized` is the privacy cost for this class or group (disparate
    impact).
    """

    model: Code
    """Name of the report field with the figures of the other model on all images."""
    top_1: Interval
    difference: Interval


class ClassifiedPart(Part):
    """Figures on the images of one class or one group of users."""

    name: SubgroupName
    images: Count
    units: Count
    top_1: Interval
    compared: list[ComparedPart]
    """Other models, except those that ignore the images."""


class ClassifiedParts(Part):
    """Classes or groups, lowest accuracy first; those with too few users are only counted."""

    shown: list[ClassifiedPart]
    too_small: Count


class ReliabilityBin(Part):
    """Images whose highest probability is in one of 15 equal bins."""

    images: Count
    confidence: Share
    """Mean of the highest probability."""
    accuracy: Share


class ConfusionRow(Part):
    """Predictions for the images of one class."""

    name: SubgroupName
    shares: list[Share]
    """Share of the images by predicted class, in the order of `Confusion.classes`."""
    others: Share
    """Share predicted as a class with too few units to be shown."""


class Confusion(Part):
    """Confusion matrix of the classes with enough units."""

    classes: list[SubgroupName]
    rows: list[ConfusionRow]

    @model_validator(mode="after")
    def _square(self) -> Confusion:
        if [row.name for row in self.rows] != self.classes:
            raise ValueError("a confusion matrix has other rows than columns")
        for row in self.rows:
            if len(row.shares) != len(self.classes):
                raise ValueError(f"row {row.name} of a confusion matrix has the wrong length")
            if not abs(sum(row.shares) + row.others - 1) < 1e-3:
                raise ValueError(f"row {row.name} of a confusion matrix does not sum to 1")
        return self


class ClassifierReport(Document, WithBaselines):
    """Written by evaluate_model for a classifier."""

    kind: ClassVar[str] = "classifier_report"
    role: ClassVar[str | None] = "evaluate"

    run_id: Name
    config_sha: Sha
    model_sha: Sha
    simulation: bool
    public_kind: Name
    bootstrap_samples: Count
    unit: Unit
    """Unit that intervals resample."""
    images: Count
    units: Count
    classes: Count
    model: Classified | None
    """The model; None: no users were held out, and nothing was measured."""
    public_backbone: ComparedClassifier | None
    """Public backbone from which private training started."""
    head_images: Count
    """Public images that its head was trained on; 0: an untrained head."""
    most_frequent: ComparedClassifier | None
    """Baseline that predicts, for each image, the shares of the classes among these images."""
    centralized: ComparedClassifier | None
    """Model trained without privacy; simulations only."""
    previous_release: ComparedClassifier | None
    reliability: list[ReliabilityBin] | None
    """Confidence against accuracy; bins of too few units are left out. None: nothing measured."""
    confusion: Confusion | None
    """None: nothing was measured, or there are more than 30 classes."""
    by_class: ClassifiedParts | None
    by_group: ClassifiedParts | None
    """Figures by group; None: no column names groups."""

    headline_label: ClassVar[str] = "top-1"
    baselines: ClassVar = ("public_backbone", "most_frequent")

    @property
    def measured(self) -> bool:
        """Returns whether figures were measured."""
        return self.model is not None

    @property
    def resampled(self) -> int:
        """Returns the number of units that intervals are drawn from."""
        return self.units

    def headline(self, name: str = "model") -> Interval | None:
        """Returns the headline figure of this model or of a compared model."""
        part: Classified | None = getattr(self, name)
        return part and part.top_1

    def log_loss(self, name: str) -> Interval | None:
        """Returns the log loss of this model or of a compared model."""
        part: Classified | None = getattr(self, name)
        return part and part.log_loss

    @property
    def best_log_loss(self) -> float | None:
        """Returns the lower log loss of public backbone and chance; None: not measured.

        `most_frequent` is left out, because its shares come from the evaluated images.
        """
        public = self.log_loss("public_backbone")
        return public and min(public.value, math.log(self.classes))

    def difference(self, name: str) -> Interval | None:
        """Returns the paired difference in the headline figure: this model minus another."""
        part: ComparedClassifier | None = getattr(self, name)
        return part and part.difference

    @model_validator(mode="after")
    def _of_one_measurement(self) -> ClassifierReport:
        named: dict[str, ComparedClassifier | None] = {
            name: getattr(self, name)
            for name in (*self.baselines, "centralized", "previous_release")
        }
        for other in filter(None, named.values()):
            if self.model is None:
                raise ValueError("some fields are measured and others are empty")
            _check_difference(self.model.top_1, other.top_1, other.difference)
        for parts in (self.by_class, self.by_group):
            shown = parts.shown if parts else []
            models = [tuple(other.model for other in part.compared) for part in shown]
            if len(set(models)) > 1 or any(len(set(one)) < len(one) for one in models):
                raise ValueError("classes or groups are not compared with the same models")
            for part in shown:
                for other in part.compared:
                    if named.get(other.model) is None:
                        raise ValueError(
                            "a class or group is compared with a model that was not measured"
                        )
                    _check_difference(part.top_1, other.top_1, other.difference)
        if self.measured != bool(self.images and self.by_class):
            raise ValueError("some fields are measured and others are empty")
        return self


def _check_difference(mine: Interval, other: Interval, difference: Interval) -> None:
    if not abs(mine.value - other.value - difference.value) < 2e-6:
        raise ValueError("a difference is not that of its two values")


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


class UtilityReport(Document, WithBaselines):
    """Written by evaluate_model for embeddings."""

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
    network_output: Compared | None
    """Output of the imported network, or its deepest tap, without constants or mirror images."""
    untrained: Compared | None
    raw_pixels: Compared | None
    """Raw images, compared as if they were embeddings."""
    centralized: Compared | None
    utility_drop: dict[Rate, Interval] | None
    """Recall of the centralized model minus recall of this model."""
    subgroups: Subgroups | None
    previous_release: Previous | None

    features: ClassVar = ("public_backbone", "frozen_features", "network_output")
    baselines: ClassVar = (*features, "untrained", "raw_pixels")

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
    def headline_label(self) -> str:
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
        for other in (*(getattr(self, name) for name in self.baselines), self.centralized):
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
