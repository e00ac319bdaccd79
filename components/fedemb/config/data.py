"""Where the private images come from, and how users become virtual clients."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from fedemb.foundation.section import Address, Fraction, Section

ONE_COHORT = "all"
"""Cohort of all users where no column names one."""


class Columns(Section):
    """Names of the columns (Parquet, CSV) or features (TFRecord) that are read."""

    image: str = "image"
    """Encoded image bytes (Parquet, TFRecord); unused for CSV and image folders."""
    user_id: str | None = "user_id"
    """The owner of the image: the unit of privacy; null with `policy.unit: image` only, where every
    row is a unit of its own."""
    label: str | None = "label"
    """Class of the image; null: every user is one class (face identities)."""
    image_id: str = "image_id"
    """CSV only: file name below `image_root`, with or without ending."""
    cohort: str | None = None
    """Public cohort of the user (sign-up month, say), for ledger blocks; null: one cohort."""
    subgroup: str | None = None
    """Attribute by which evaluation is broken down; null: none."""


ENDINGS = {
    "parquet": re.compile(r"\.(parquet|pq)$", re.IGNORECASE),
    "tfrecord": re.compile(r"[._-]tfrecords?[-0-9of*?\[\]]*(\.(gz|gzip|zlib))?$", re.IGNORECASE),
    "csv": re.compile(r"\.csv$", re.IGNORECASE),
}
"""Of the names of files by their format."""


def format_of(name: str) -> str:
    """The format of a file by the ending of its name or address; a folder per user without one."""
    found = (kind for kind, ending in ENDINGS.items() if ending.search(name.rstrip("/")))
    return next(found, "image_folder")


class SourceConfig(Section):
    """Where images come from."""

    uri: Address
    """File, folder or glob; local, gs:// or s3://. `builtin` stands for the generated glyphs."""
    format: Literal["auto", "parquet", "tfrecord", "image_folder", "csv"] = "auto"
    """`auto` decides by the ending: .parquet, .tfrecord[.gz], .csv, else a folder per user."""
    image_root: Address | None = None
    """CSV only: folder of the image files; null: the one the CSV lies in."""
    columns: Columns = Columns()
    """Which column is what."""
    where: dict[str, tuple[str, ...]] = Field(default={})
    """Keep a record only if each named column has one of the values: a public filter."""
    label_names: tuple[str, ...] = ()
    """Names of the classes by their numbers, from 0, in the column of labels; other numbers are not
    classes. Empty: labels are used as they are. `fedemb init` reads those of Hugging Face."""
    label_scope: Literal["user", "global"] = "user"
    """`user`: labels mean nothing outside their user (identities); `global`: shared classes."""

    @property
    def file_format(self) -> str:
        """The format; `auto` is decided by the ending of the address."""
        return format_of(self.uri) if self.format == "auto" else self.format


class BuiltinData(Section):
    """The procedural glyph data of `make run`: every identity is a random stroke glyph."""

    users: Annotated[int, Field(ge=100, le=10_000_000)] = 32_000
    """Private identities to draw."""
    images_per_user: Annotated[int, Field(ge=1, le=100)] = 4
    """Images of each identity, with jitter in pose, thickness and noise."""
    classes: Annotated[int, Field(ge=0, le=500)] = 0
    """Glyphs that all users write, each in a hand of their own; 0: every user is one glyph."""
    public_classes: Annotated[int, Field(ge=2, le=10_000)] = 64
    """Classes of the small public set, drawn in another stroke style."""
    public_images_per_class: Annotated[int, Field(ge=2, le=1000)] = 8
    """Images of each public class."""
    seed: NonNegativeInt = 0
    """The same seed gives the same bytes."""


class DataConfig(Section):
    """The private images."""

    source: SourceConfig
    """Where the private images are."""
    builtin: BuiltinData = BuiltinData()
    """Used only where `source.uri` is `builtin`."""
    max_pixels: Annotated[int, Field(ge=1024)] = 50_000_000
    """Width x height above which an image is dropped unread (decompression bombs)."""
    max_bad_fraction: Fraction = 0.01
    """`fedemb check-data` fails above this share of bad records. The pipeline itself never does."""


class EvaluationByHash(Section):
    """Hold out users, and classes if they are shared, by keyed hash."""

    by: Literal["hash"] = "hash"
    fraction: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.1
    """Expected share of users (and of shared classes) that never train."""
    classes: tuple[str, ...] = ()
    """Public list of all shared classes: this share of them, two at least, is held out, drawn by
keyed hash, and others go nowhere. Empty: each class has a coin of its own, for many classes."""


class EvaluationByValue(Section):
    """Hold out every record with one of the named values, e.g. alphabets."""

    by: Literal["value"]
    column: str
    """Column that decides; users and classes are taken to lie inside one value."""
    values: tuple[str, ...] = Field(min_length=1)
    """Values that never train."""


class PartitionConfig(Section):
    """How users become virtual clients. All numbers here are public constants."""

    virtual_clients: PositiveInt
    """Virtual clients per grouping (G); fixed by policy, never from the exact user count."""
    groupings: Annotated[int, Field(ge=1, le=10_000)] = 1
    """Independent groupings (R); round r uses grouping r mod R."""
    max_images_per_user: PositiveInt = 64
    """Images kept per user, chosen in keyed-hash order; the rest is dropped and counted."""
    evaluation: EvaluationByHash | EvaluationByValue = Field(
        default=EvaluationByHash(), discriminator="by"
    )
    """Which users and classes are held out for evaluation."""
    cohorts: tuple[str, ...] = (ONE_COHORT,)
    """Cohorts this run may touch; users of other cohorts are left out."""
    blocks_per_cohort: Annotated[int, Field(ge=1, le=1000)] = 1
    """Hash buckets per cohort; block = cohort/bucket, fixed for life."""
    shards: Annotated[int, Field(ge=1, le=10_000)] = 4
    """Output files."""
