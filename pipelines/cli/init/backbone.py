"""The public backbone of `fedemb init`: none, public photos, or a `.keras` file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from fedemb.config import PretrainingConfig
from fedemb.data.columns import guess_source
from fedemb.errors import ConfigError, InputError
from fedemb.models.imported import check_import, image_shape, known_pixels, with_card
from fedemb.models.public_backbone.card import BackboneCard, Tap, read_card
from fedemb.pipelines.cli.init.photos import Photos, absolute
from fedemb.pipelines.cli.init.recipes import (
    COVARIANCE_DIRECTIONS,
    PRINCIPAL_DIRECTIONS,
    WHITENED_DIRECTIONS,
)
from fedemb.pipelines.output import say

_TAPS = ("head", "last_block")
"""Taps whose features are joined, if the card of the file has them."""


@dataclass(frozen=True, kw_only=True)
class Backbone:
    """Public backbone of a training.

    Attributes:
      pretraining: the section `pretraining` of the configuration.
      shape: input size and channels that a `.keras` file fixes; None if it fixes none.
      card: card of a `.keras` file; None if it has none.
    """

    pretraining: dict[str, object]
    shape: tuple[int, int] | None = None
    card: BackboneCard | None = None

    @property
    def imported(self) -> bool:
        """Whether the backbone is a `.keras` file."""
        return self.pretraining["kind"] == "import"

    @property
    def pretrained(self) -> bool:
        """Whether the backbone is trained on public photos."""
        return self.pretraining["kind"] == "supervised"

    def constants(self, directions: str) -> dict[str, object]:
        """Returns settings of constants from public photos; empty without such photos."""
        if "source" not in self.pretraining:
            return {}
        principal = directions == "principal_directions"
        count = PRINCIPAL_DIRECTIONS if principal else WHITENED_DIRECTIONS
        return {"square_root": True, directions: count}

    def projected(self) -> dict[str, object]:
        """Returns settings of the features that a projection reads; empty for other backbones."""
        constants = self.constants("principal_directions") if self.imported else {}
        taps = [tap.name for tap in self.taps()] if constants else []
        return {**constants, "taps": taps} if taps else constants

    def whitened(self) -> dict[str, object]:
        """Returns settings of the features whose covariance is released; empty if not possible.

        The number of features comes from the card of the file, and constants from public photos.
        """
        if self.card is None or not self.projected():
            return {}
        directions = min(COVARIANCE_DIRECTIONS, self.width)
        return {
            **self.projected(),
            "principal_directions": directions,
            "embedding_dim": directions,
        }

    @property
    def width(self) -> int:
        """Returns the number of joined features; 0 without a card."""
        return sum(tap.features for tap in self.taps()) or (self.card.features if self.card else 0)

    def taps(self) -> list[Tap]:
        """Returns the layers of the file whose features are joined; empty without a card."""
        return [tap for tap in self.card.taps if tap.name in _TAPS] if self.card else []

    def features(self) -> dict[str, object]:
        """Returns settings of the features that the head of a classifier reads.

        Without a card, the number of features is not known, and a projection is trained too.
        """
        if self.card is None:
            return {"projection": True, "trainable": "projection"}
        return {
            "taps": [tap.name for tap in self.taps()],
            "embedding_dim": self.width,
            **self.constants("whitened_directions"),
        }

    def image_shape(self, photos: Photos) -> tuple[int, int]:
        """Returns size in pixels and channels of the model's input."""
        return self.shape or (photos.size, photos.channels)

    def images(self, photos: Photos) -> str:
        """Returns the model's input as text."""
        size, channels = self.image_shape(photos)
        return f"{size} x {size} pixels, {'colour' if channels > 1 else 'grey'},"


def backbone_of(
    start: str, photos: str | None, pixels: str | None, ask: Callable[[str], str]
) -> Backbone:
    """Returns the backbone for `--public`.

    Args:
      start: public photos, a `.keras` file or `none`.
      photos: public photos for the constants of a `.keras` file's features.
      pixels: pixel format of the `.keras` file; None to read it from the file.
      ask: asks a question on the terminal.

    Raises:
      ConfigError: the pixel format is unknown or not for this backbone.
      InputError: the file does not exist.
    """
    uri = absolute(start)
    if start.endswith(".keras"):
        return _imported(Path(start), uri, photos, pixels, ask)
    if photos:
        raise ConfigError(
            f"--public-photos is for a .keras file, and --public is {start}. Drop --public-photos."
        )
    if pixels:
        raise ConfigError(f"--pixels is for a .keras file, and --public is {start}. Drop --pixels.")
    if start == "none":
        return Backbone(pretraining={"kind": "none"})
    _require(start)
    source = guess_source(uri, {}).model_dump(mode="json", exclude_defaults=True)
    return Backbone(
        pretraining={
            "kind": "supervised",
            "source": source,
            "loss": {"kind": "cosface"},
            "doublings": 2,
        }
    )


def _require(start: str) -> None:
    if "://" not in start and not Path(start).exists():
        raise InputError(f"{start} does not exist. Pass public photos, a .keras file or none.")


def _imported(
    path: Path, uri: str, photos: str | None, pixels: str | None, ask: Callable[[str], str]
) -> Backbone:
    check_import(path, "projection")
    section: dict[str, object] = {"kind": "import", "import_path": uri}
    section["import_pixels"] = _pixel_format(path, pixels, ask)
    found = with_card(path, PretrainingConfig.model_validate(section))
    fields = {"licence", "provenance"}
    section |= found.model_dump(mode="json", include=fields, exclude_defaults=True)
    if photos:
        _require(photos)
        found_photos = guess_source(absolute(photos), {})
        section["source"] = found_photos.model_dump(mode="json", exclude_defaults=True)
    else:
        say("no --public-photos: the features are not standardised, which costs accuracy")
    return Backbone(pretraining=section, shape=image_shape(path), card=read_card(path))


def _pixel_format(path: Path, given: str | None, ask: Callable[[str], str]) -> str:
    """Returns the pixel format that the file was trained on."""
    known = known_pixels(path)
    if given is None and known:
        say(f"{path.name} expects pixels in {known[0]}, read from {known[1]} (see --pixels)")
        return known[0]
    kinds = get_args(PretrainingConfig.model_fields["import_pixels"].annotation)
    chosen = given or ask(f"Pixel format that {path.name} was trained on ({', '.join(kinds)})?")
    if chosen not in kinds:
        raise ConfigError(f"--pixels is {chosen}. Pass one of {', '.join(kinds)}.")
    if known and known[0] != chosen:
        say(f"warning: --pixels is {chosen}, but {known[1]} implies {known[0]}")
    return chosen
