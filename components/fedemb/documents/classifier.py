"""How good a classifier is: exact figures on people who never trained and no guarantee covers."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import model_validator

from fedemb.config.policy import Unit
from fedemb.documents.fields import Code, Count, Interval, Name, Sha, Share, Spread, SubgroupName
from fedemb.documents.starts import OverStarts
from fedemb.foundation.document import Document, Part, Since


class Classified(Part):
    """One model."""

    top_1: Interval
    """Share of images whose class is named first; ties are broken by lot, on average."""
    top_5: Interval
    log_loss: Interval
    calibration_error: Share
    """Mean gap between confidence and accuracy, over 15 equal bins of confidence (ECE)."""
    calibration_interval: Annotated[Spread | None, Since(4, before=None)]
    """95 % of the draws, less what chance adds: it makes a gap in every bin, so that the figure of
    a calibrated model is not 0 and the draws are larger still. Near 0 it is too short."""


class ComparedClassifier(Classified):
    """Another model on the same images, and this model's top-1 minus that one's, paired."""

    difference: Interval


class ComparedAverage(ComparedClassifier):
    """Another average of the weights of the same training."""

    decay: Share


class MeasuredAverages(Part):
    """The averages of the weights that a training kept. Which one is released was fixed before."""

    released_decay: Share
    others: list[ComparedAverage]
    """As the configuration lists them."""


class ComparedPart(Part):
    """Another model on the images of a class or a group, and what this model gains on it, paired.

    Minus the gain on `centralized` is what privacy costs this class or group: disparate impact.
    """

    model: Code
    """The field of the report that holds its figures on all images."""
    top_1: Interval
    difference: Interval


class ClassifiedPart(Part):
    """The images of one class, or of one group of people."""

    name: SubgroupName
    images: Count
    units: Count
    top_1: Interval
    compared: Annotated[list[ComparedPart], Since(4, before=[])]
    """Other models that need the images to answer."""


class ClassifiedParts(Part):
    """Worst served first; those of too few users are counted and not shown."""

    shown: list[ClassifiedPart]
    too_small: Count


class ClassifierReport(Document, OverStarts):
    """Written by evaluate_classifier."""

    kind: ClassVar[str] = "classifier_report"
    newest: ClassVar[int] = 4
    role: ClassVar[str | None] = "evaluate"

    run_id: Name
    config_sha: Sha
    model_sha: Sha
    simulation: bool
    public_kind: Name
    bootstrap_samples: Count
    unit: Unit
    """What intervals resample."""
    images: Count
    units: Count
    classes: Count
    model: Classified | None
    """None: nobody was held out, and nothing was measured."""
    public_backbone: ComparedClassifier | None
    """Where private training started."""
    untrained: ComparedClassifier | None
    most_frequent: Annotated[ComparedClassifier | None, Since(2, before=None)]
    """Gives each image the shares of the classes among these images."""
    centralized: ComparedClassifier | None
    """Trained without privacy; in simulations alone."""
    previous_release: ComparedClassifier | None
    averages: Annotated[MeasuredAverages | None, Since(3, before=None)]
    """None: the released one alone was kept, or nothing was measured."""
    by_class: ClassifiedParts | None
    by_group: ClassifiedParts | None
    """None: no column names groups."""

    headline_words: ClassVar[str] = "top-1"
    starts: ClassVar = ("public_backbone", "untrained", "most_frequent")

    @property
    def measured(self) -> bool:
        """Whether there are figures."""
        return self.model is not None

    @property
    def resampled(self) -> int:
        """How many units intervals are drawn from."""
        return self.units

    def headline(self, name: str = "model") -> Interval | None:
        """The figure that is named first, of this model or one it is compared with."""
        part: Classified | None = getattr(self, name)
        return part and part.top_1

    def difference(self, name: str) -> Interval | None:
        """That figure of this model minus another's, paired."""
        part: ComparedClassifier | None = getattr(self, name)
        return part and part.difference

    @property
    def decays(self) -> tuple[float, ...]:
        """Of each average that was measured, the released one first; empty where it is alone."""
        kept = self.averages
        return () if kept is None else (kept.released_decay, *(one.decay for one in kept.others))

    @model_validator(mode="after")
    def _of_one_measurement(self) -> ClassifierReport:
        named: dict[str, ComparedClassifier | None] = {
            name: getattr(self, name) for name in (*self.starts, "centralized", "previous_release")
        }
        others = [other for other in named.values() if other is not None]
        for other in (*others, *(self.averages.others if self.averages else ())):
            if self.model is None:
                raise ValueError("it is measured in one place and not in another")
            _check_difference(self.model.top_1, other.top_1, other.difference)
        for parts in (self.by_class, self.by_group):
            shown = parts.shown if parts else []
            models = [tuple(other.model for other in part.compared) for part in shown]
            if len(set(models)) > 1 or any(len(set(one)) < len(one) for one in models):
                raise ValueError("parts are not compared with the same models")
            for part in shown:
                for other in part.compared:
                    if named.get(other.model) is None:
                        raise ValueError("a part is compared with what was not measured")
                    _check_difference(part.top_1, other.top_1, other.difference)
        if self.measured != bool(self.images and self.by_class):
            raise ValueError("it is measured in one place and not in another")
        return self


def _check_difference(mine: Interval, other: Interval, difference: Interval) -> None:
    if not abs(mine.value - other.value - difference.value) < 2e-6:
        raise ValueError("a difference is not that of the figures")
