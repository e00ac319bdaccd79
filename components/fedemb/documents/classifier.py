"""Utility report of a classifier: exact figures on held-out users, whom no guarantee covers."""

from __future__ import annotations

from typing import ClassVar

from pydantic import model_validator

from fedemb.config.policy import Unit
from fedemb.documents.fields import Code, Count, Interval, Name, Sha, Share, Spread, SubgroupName
from fedemb.documents.starts import OverStarts
from fedemb.foundation.document import Document, Part


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


class ClassifierReport(Document, OverStarts):
    """Written by evaluate_classifier."""

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
    untrained: ComparedClassifier | None
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

    headline_words: ClassVar[str] = "top-1"
    starts: ClassVar = ("public_backbone", "untrained", "most_frequent")

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
        """Returns the lowest log loss of the untrained and the public model; None: not measured.

        `most_frequent` is left out, because its shares come from the evaluated images.
        """
        names = ("public_backbone", "untrained")
        found = [loss.value for name in names if (loss := self.log_loss(name))]
        return min(found, default=None)

    def difference(self, name: str) -> Interval | None:
        """Returns the paired difference in the headline figure: this model minus another."""
        part: ComparedClassifier | None = getattr(self, name)
        return part and part.difference

    @model_validator(mode="after")
    def _of_one_measurement(self) -> ClassifierReport:
        named: dict[str, ComparedClassifier | None] = {
            name: getattr(self, name) for name in (*self.starts, "centralized", "previous_release")
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
