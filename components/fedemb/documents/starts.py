"""What could be had without private data, and how much better than the best of it a model is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from fedemb.config import RunConfig
from fedemb.documents.fields import Interval


def starts_of(config: RunConfig) -> tuple[str, ...]:
    """What the model of a run is measured against: fields of its utility report.

    The public start that private training changes; the frozen features under a projection, which
    starts as a random map of them; an untrained net, where the start is pretrained here (an
    imported one has the layers of its file, whatever its name says); the pixels themselves; the
    most frequent class, for a classifier.
    """
    embeds = config.task == "embedding"
    others = {
        "frozen_features": embeds and config.model.trainable == "projection",
        "untrained": config.pretraining.kind not in ("none", "import"),
        "raw_pixels": embeds,
        "most_frequent": not embeds,
    }
    return ("public_backbone", *(name for name, asked in others.items() if asked))


class OverStarts(ABC):
    """Of both reports of utility: the gain is over the best start, and paired with that one."""

    starts: ClassVar[tuple[str, ...]]
    """Fields of what needs no private data; of equals the first counts."""

    @abstractmethod
    def headline(self, name: str = "model") -> Interval | None:
        """The figure that is named first, of this model or one it is compared with."""

    @abstractmethod
    def difference(self, name: str) -> Interval | None:
        """That figure of this model minus another's, paired."""

    @property
    def measured_starts(self) -> dict[str, Interval]:
        """The headline figure of each start that was measured."""
        return {name: found for name in self.starts if (found := self.headline(name))}

    @property
    def best_start(self) -> str | None:
        """The start with the highest figure; None: the public one was not measured."""
        found = self.measured_starts
        if "public_backbone" not in found:
            return None
        return max(found, key=lambda name: found[name].value)

    @property
    def gain(self) -> Interval | None:
        """What private training was good for: the model minus the best start, paired."""
        return self.difference(self.best_start) if self.best_start else None
