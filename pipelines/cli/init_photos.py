"""Counts photos for `fedemb init` and describes them to their owner."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedemb.config import RunConfig, SourceConfig
from fedemb.config.data import ENDINGS, Columns
from fedemb.data.columns import column_names, guess_source
from fedemb.data.image_files import is_side_file
from fedemb.data.sources import find_parts, split_part
from fedemb.errors import ConfigError, InputError
from fedemb.partition.check import BAD, LEFT_OUT, Census, inexact_ids, remarks, take_census
from fedemb.pipelines.cli.init_options import InitOptions
from fedemb.pipelines.output import say
from fedemb.pipelines.run.load_config import validate
from fedemb.privacy.section import UNITS, UnitText, count_of
from fedemb.privacy.unit_mechanisms import PoissonGaussian

_SIZES = (28, 32, 48, 64)
"""Image sizes of the model to choose from; the largest that most photos have is chosen."""
_DECIDED_BY_KEY = 1e-12
"""Held-out fraction while all users are counted: the run's key decides who is held out."""
_LABELS_SHOWN = 50
_FOLDERS_SHOWN = 20
"""Largest number of folder names that are printed."""


@dataclass(frozen=True, kw_only=True)
class Photos:
    """Photos of one owner, counted. Private except for `source`.

    Attributes:
      source: the source, with shared classes for a classifier.
      census: counts of the source.
      size: height and width that suit the photos, in pixels.
      channels: 1 (grey) or 3 (colour).
      aspect_ratio: squash or letterbox.
      class_folders: folders that are one class each; empty if folders are users.
    """

    source: SourceConfig
    census: Census
    size: int
    channels: int
    aspect_ratio: str
    class_folders: list[str]

    @property
    def unit(self) -> UnitText:
        """The unit of privacy."""
        return UNITS["image" if self.of_images else "user"]

    @property
    def of_images(self) -> bool:
        """Whether each image is its own unit of privacy."""
        return self.source.columns.user_id is None

    @property
    def users(self) -> int:
        """Users with at least one usable photo."""
        return len(self.census.sizes) + len(self.census.held_out_sizes)

    @property
    def images(self) -> int:
        """Usable images, each counted as its own unit."""
        lost = [name for name in (*BAD, *LEFT_OUT) if name != "dropped_over_cap"]
        return self.census.counts["rows"] - sum(self.census.counts[name] for name in lost)

    @property
    def usable_units(self) -> int:
        """Usable units of privacy."""
        return self.images if self.of_images else self.users


def _source(options: InitOptions, *, classify: bool) -> SourceConfig:
    """Returns the source that the options describe.

    Raises:
      ConfigError: an option is unknown.
      InputError: the photos are missing or have no such columns.
    """
    named: dict[str, str] = {}
    for item in options.column or []:
        column, _, name = item.partition("=")
        if column not in Columns.model_fields or not name:
            known = ", ".join(Columns.model_fields)
            raise ConfigError(
                f"--column is {item}. Pass COLUMN=NAME, where COLUMN is one of {known}."
            )
        named[column] = name
    formats = (*ENDINGS, "image_folder")
    if options.format_ not in (None, *formats):
        raise ConfigError(f"--format is {options.format_}. Pass one of {', '.join(formats)}.")
    root = absolute(options.image_root) if options.image_root else None
    source = guess_source(absolute(options.data), named, options.format_, root)
    if source.columns.user_id is None and not classify:
        raise ConfigError(
            "--column is user_id=none, and embeddings need the owner of each image. Pass --task "
            "classification, or the column of owners by --column user_id=NAME."
        )
    if options.alike == "user":
        without = source.columns.model_copy(update={"label": None})
        return source.model_copy(update={"label_scope": "user", "columns": without})
    return source


def absolute(address: str) -> str:
    """Returns an address that does not depend on the current folder."""
    return address if "://" in address else str(Path(address).resolve())


def _source_of_classes(source: SourceConfig) -> tuple[SourceConfig, list[str]]:
    """Returns the source with shared classes, and the folders that are one class each.

    Folders without folders inside are classes without owners: each image is a unit of privacy.

    Raises:
      ConfigError: the class of a photo is not known.
      StorageError: the folder cannot be read.
    """
    columns, folders = source.columns, list[str]()
    if columns.label is None and source.file_format == "image_folder":
        columns = columns.model_copy(update={"user_id": None, "label": "label"})
        pieces = (piece for part in find_parts(source, []) for piece in split_part(part))
        named = {name for piece in pieces for name in piece.folders}
        folders = sorted(name for name in named if not is_side_file(f"{name}/photo"))
    if columns.label is None:
        raise ConfigError(
            "--task is classification, and no column has the class of a photo. Pass one of "
            f"{', '.join(column_names(source.uri, source.file_format))} by --column label=NAME."
        )
    return source.model_copy(update={"label_scope": "global", "columns": columns}), folders


def survey(options: InitOptions, *, classify: bool, progress: Callable[[int], None]) -> Photos:
    """Counts the photos and chooses the image size and channels that suit them.

    Raises:
      InputError: the photos are missing, no photo is usable, or user ids have lost digits.
      ConfigError: an option is unknown, or the class of a photo is not known.
    """
    source, aspect_ratio = _source(options, classify=classify), options.aspect_ratio
    census = take_census(_counting_config(source, aspect_ratio), progress)
    if refused := inexact_ids(census):
        raise InputError(" ".join(refused))
    if not len(census.sizes) + len(census.held_out_sizes):
        reasons = BAD | {"side_file": LEFT_OUT["side_file"]}
        found = [
            f"{census.counts[name]:,}: {text}"
            for name, text in reasons.items()
            if census.counts[name]
        ]
        why = "; ".join(found) or f"{census.counts['rows']:,} records"
        raise InputError(
            f"No photo in {source.uri} is usable ({why}). Repair the photos, or pass the names of "
            "the columns by --column.",
            *remarks(census, source),
        )
    fitting = [size for size in _SIZES if size <= census.median_side]
    labelled, folders = _source_of_classes(source) if classify else (source, [])
    return Photos(
        source=labelled,
        census=census,
        size=max(fitting, default=_SIZES[0]),
        channels=3 if census.colour else 1,
        aspect_ratio=aspect_ratio,
        class_folders=folders,
    )


def _counting_config(source: SourceConfig, aspect_ratio: str) -> RunConfig:
    return validate(
        {
            "purpose": "simulation",
            "data": {"source": source.model_dump(mode="json")},
            "partition": {
                "virtual_clients": 1,
                "evaluation": {"by": "hash", "fraction": _DECIDED_BY_KEY},
            },
            "model": {"image_size": _SIZES[-1], "channels": 3, "aspect_ratio": aspect_ratio},
            "mechanism": {
                "kind": PoissonGaussian.kind_name(),
                "rounds": 1,
                "sampling_probability": 1.0,
                "units_per_round": 1,
                "noise_multiplier": 1.0,
            },
            "policy": {
                "users_lower_bound": 2,
                "delta": 0.1,
                "epsilon_cap": 1.0,
                "unit": "image" if source.columns.user_id is None else "user",
            },
        }
    )


def check_classes(classes: Sequence[str], census: Census) -> None:
    """Rejects a list of classes of which no photo has one.

    Raises:
      ConfigError: no class is a label of the photos.
    """
    if not census.labels or set(classes) & set(census.labels):
        return
    shown = ",".join(sorted(census.labels)[:_LABELS_SHOWN])
    spelled = {label.casefold(): label for label in census.labels}
    other = [spelled[name.casefold()] for name in classes if name.casefold() in spelled]
    hint = f"--classes {','.join(other)}" if other else "--classes with names from this list"
    raise ConfigError(
        f"No photo has one of the classes {', '.join(classes)}. The labels of the photos are "
        f"{shown}. Pass {hint}, if you may publish them."
    )


def describe(photos: Photos) -> None:
    """Prints the counts of the photos for their owner."""
    census, rows = photos.census, count_of(photos.census.counts["rows"], "photo")
    if photos.class_folders or photos.of_images:
        say(f"{rows}; {photos.images:,} usable (private figures, not for publication)")
        folders = _listed(photos.class_folders)
        say(folders if photos.class_folders else count_of(census.classes, "label"))
    else:
        say(
            f"{rows}; {count_of(photos.users, 'usable user')} with {census.sizes.mean():.3g} photos"
            f" each; {census.classes:,} classes, {census.common_classes:,} of them shared by users "
            "(private figures, not for publication)"
        )
        if photos.users == 1:
            say(
                "warning: all photos are of one user. Pass the folder whose folders are users, or "
                "the column of owners by --column user_id=NAME."
            )
        elif photos.source.file_format == "image_folder":
            say(
                "each folder is one user. For folders of classes pass --task classification "
                "--classes a,b,c. For folders of splits pass a table of photos and owners."
            )
    for line in remarks(census, photos.source):
        say(f"  {line}")
    for name, text in (BAD | {"side_file": LEFT_OUT["side_file"]}).items():
        if census.counts[name]:
            say(f"  {census.counts[name]:,} not usable: {text}")


def _listed(folders: list[str]) -> str:
    more = len(folders) - _FOLDERS_SHOWN
    shown = ", ".join(folders[:_FOLDERS_SHOWN])
    return f"each folder is one class: {shown}" + (f" and {more:,} more" if more > 0 else "")
