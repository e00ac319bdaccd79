"""The rows of the study: what each part compares, in the order of what it costs to run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from fedemb.foundation.canonical_json import json_digest

Part = Literal["ladder", "layers", "noise", "units", "samplers", "squares"]
DELTA = 1e-5
TRAIN, HELD_OUT = 10_000, 4_000
"""Images of the training half of CIFAR-10 (JPEG) that train and that are measured."""
TITLES: dict[Part, str] = {
    "samplers": "What the same noise may claim, by sampler",
    "squares": "One noised round of least squares, or a trained head",
    "noise": "Accuracy against noise at epsilon 3, by batch",
    "layers": "Head only, or all layers",
    "units": "Users protected by sampling them whole, or image by image",
    "ladder": "The ladder of De et al., a scaled simulation",
}


@dataclass(frozen=True, eq=False)
class Row:
    """One training, or one price."""

    part: Part
    name: str
    """Name of the row within its part."""
    at: float
    """Where on the axis of the part: an epsilon, a number of rounds, or a step."""
    settings: dict[str, Any] = field(default_factory=dict)
    """What `train.run_row` is given."""
    seed: int = 0

    @property
    def digest(self) -> str:
        """Name of its result."""
        return json_digest(asdict(self))[:24]


def rows(seeds: int = 1) -> list[Row]:
    """All rows, cheapest parts first; every part once with the first seed before the second."""
    parts = (_samplers, _squares, _noise, _layers, _units, _ladder)
    made = [row for part in parts for row in part()]
    prices = [row for row in made if row.part == "samplers"]
    trained = [row for row in made if row.part != "samplers"]
    again = [Row(**{**vars(row), "seed": seed}) for seed in range(seeds) for row in trained]
    return [*prices, *again]


def _samplers() -> Iterator[Row]:
    """Ten epochs of ten rounds; the noise of a round against what each order of batches costs."""
    for noise in (1.2, 1.5, 2.0, 3.0, 4.0):
        for name in ("poisson", "shuffled"):
            yield Row("samplers", name, noise, {"epochs": 10, "rounds_per_epoch": 10})


def _squares() -> Iterator[Row]:
    for epsilon in (1.0, 2.0, 4.0, 8.0):
        yield Row("squares", "least squares", epsilon, {"features": "public", "solver": "squares"})
        head = {"features": "public", "batch": TRAIN, "rounds": 60, "rate": 24.0}
        yield Row("squares", "trained head", epsilon, head)


def _noise() -> Iterator[Row]:
    """A linear head on scattering features; fewer rounds mean less noise for each."""
    for batch in (256, 1024, 4096, TRAIN):
        for rounds in (5, 20, 80, 320, *([1280] if batch <= 1024 else [])):
            head = {"features": "scatter", "batch": batch, "rounds": rounds, "rates": [4.0, 12.0]}
            yield Row("noise", f"batch {batch}", rounds, {**head, "epsilon": 3.0})


def _layers() -> Iterator[Row]:
    for epsilon in (1.0, 2.0, 4.0, 8.0):
        head = {"features": "public", "batch": TRAIN, "rounds": 60, "rate": 24.0}
        yield Row("layers", "head only", epsilon, head)
        net = {"net": "resnet8", "start": True, "batch": 1024, "rounds": 60, "rate": 1.0}
        yield Row("layers", "all layers", epsilon, net)


def _units() -> Iterator[Row]:
    """Glyphs of 3,000 writers, four images each, all in their own hand."""
    for epsilon in (2.0, 4.0, 8.0):
        for clip in (0.3, 1.0):
            for name in ("whole users", "image by image"):
                yield Row("units", f"{name}, clip {clip:g}", epsilon, {"clip": clip})


LADDER: tuple[tuple[str, dict[str, Any]], ...] = (
    ("no normalisation", {"model": {"norm_groups": 0}, "batch": 1024}),
    ("GroupNorm", {"batch": 1024}),
    ("batch 4096", {}),
    ("standardised weights", {"net": "resnet8_ws"}),
    ("4 views", {"net": "resnet8_ws", "views": 4}),
    ("averaged weights", {"net": "resnet8_ws", "views": 4, "average": 0.97}),
)


def _ladder() -> Iterator[Row]:
    """Epsilon 8 at 50,000 images; batch and noise at 1/16, noise on the mean the same (TAN)."""
    whole = {"net": "resnet8", "batch": 4096, "rounds": 250, "rate": 2.0, "share": 1 / 16}
    for step, (name, changes) in enumerate(LADDER, start=1):
        settings = {**whole, **changes, "epsilon": 8.0, "population": 50_000}
        yield Row("ladder", name, step, settings)
