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
from fedemb.models.public_backbone.card import BackboneCard, read_card
from fedemb.pipelines.cli.init.photos import absolute
from fedemb.pipelines.cli.init.recipes import Recipe, Section
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

    pretraining: Section
    shape: tuple[int, int] | None = None
    card: BackboneCard | None = None

    @property
    def imported(self) -> bool:
        """Whether the backbone is a `.keras` file."""
        return self.pretraining["kind"] == "import"

    @property
    def standardised(self) -> bool:
        """Whether the number of features of a file is known, and public photos give constants."""
        return self.card is not None and "source" in self.pretraining

    def features(self, recipe: Recipe) -> Section:
        """Returns settings of the features of a `.keras` file that a recipe reads."""
        if not self.imported:
            return {}
        if self.card is None and recipe.classifies:  # their number is not known
            return {"projection": True, "trainable": "projection", "embedding_dim": 64}
        taps = [tap for tap in self.card.taps if tap.name in _TAPS] if self.card else []
        width = sum(tap.features for tap in taps) or (self.card.features if self.card else 0)
        directions = recipe.principal_directions
        directions = min(directions, width) if width else directions
        found: Section = {}
        if "source" in self.pretraining:
            principal = {"principal_directions": directions}
            whitened = {"whitened_directions": recipe.whitened_directions}
            found = {"square_root": True, **(principal if directions else whitened)}
        if taps and (found or recipe.classifies):
            found["taps"] = [tap.name for tap in taps]
        if "embedding_dim" not in recipe.model:
            found["embedding_dim"] = directions or width
        return found


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
    if start.endswith(".keras"):
        return _imported(Path(start), photos, pixels, ask)
    if photos:
        raise ConfigError(
            f"--public-photos is for a .keras file, and --public is {start}. Drop --public-photos."
        )
    if pixels:
        raise ConfigError(f"--pixels is for a .keras file, and --public is {start}. Drop --pixels.")
    if start == "none":
        return Backbone(pretraining={"kind": "none"})
    loss = {"kind": "cosface"}
    return Backbone(
        pretraining={"kind": "supervised", "source": _source(start), "loss": loss, "doublings": 2}
    )


def _source(photos: str) -> Section:
    if "://" not in photos and not Path(photos).exists():
        raise InputError(f"{photos} does not exist. Pass public photos, a .keras file or none.")
    return guess_source(absolute(photos), {}).model_dump(mode="json", exclude_defaults=True)


def _imported(
    path: Path, photos: str | None, pixels: str | None, ask: Callable[[str], str]
) -> Backbone:
    check_import(path, "projection")
    section: Section = {"kind": "import", "import_path": absolute(str(path))}
    section["import_pixels"] = _pixel_format(path, pixels, ask)
    found = with_card(path, PretrainingConfig.model_validate(section))
    fields = {"licence", "provenance"}
    section |= found.model_dump(mode="json", include=fields, exclude_defaults=True)
    if photos:
        section["source"] = _source(photos)
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
