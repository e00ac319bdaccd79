"""Baselines that need no private data, and the gain of a model over the best baseline."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from fedemb.config import RunConfig
from fedemb.documents.fields import Interval

LEAST_RESAMPLED = 6
"""Minimum number of identities or units for an interval. With five identities and no real gain, all
five gain by chance in 1 of 32 cases, and every resample of them shows a gain."""


def starts_of(config: RunConfig) -> tuple[str, ...]:
    """Returns the baselines of a run's model, as field names of its utility report.

    The baselines are:

    - the public backbone that private training changes;
    - the frozen features under a projection, which starts as a random map of them;
    - an untrained network, if the backbone is pretrained in this run (an imported one has the
      layers of its file, whatever the backbone name);
    - the raw pixels;
    - the most frequent class, for a classifier.
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
    """Base of both utility reports: the paired gain over the best baseline."""

    starts: ClassVar[tuple[str, ...]]
    """Fields of the baselines that need no private data; the first wins a tie."""

    @abstractmethod
    def headline(self, name: str = "model") -> Interval | None:
        """Returns the headline figure of this model or of a compared model."""

    @abstractmethod
    def difference(self, name: str) -> Interval | None:
        """Returns the paired difference in the headline figure: this model minus another."""

    @property
    def measured_starts(self) -> dict[str, Interval]:
        """Returns the headline figure of each measured baseline."""
        return {name: found for name in self.starts if (found := self.headline(name))}

    @property
    def best_start(self) -> str | None:
        """Returns the baseline with the highest figure; None: the public one was not measured."""
        found = self.measured_starts
        if "public_backbone" not in found:
            return None
        return max(found, key=lambda name: found[name].value)

    @property
    def gain(self) -> Interval | None:
        """Returns the gain of private training: the model minus the best baseline, paired."""
        return self.difference(self.best_start) if self.best_start else None
