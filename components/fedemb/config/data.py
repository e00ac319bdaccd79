"""Settings of the private image source and of the partition of users into virtual clients."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from fedemb.foundation.section import Address, Fraction, Section

BUILTIN = "builtin"
"""Source address of the generated images, before `fedemb run` writes them to a file."""
ONE_COHORT = "all"
"""Cohort of all users when no column names a cohort."""


class Columns(Section):
    """Names of columns or features (TFRecord)."""

    image: str = "image"
    """Encoded image bytes (Parquet, TFRecord); unused for CSV and image folders."""
    user_id: str | None = "user_id"
    """Owner of the image, which is the unit of privacy. Must be null with `policy.unit: image`,
    where each row is a separate unit, and set otherwise."""
    label: str | None = "label"
    """Class of the image; null: each user is one class (face identities)."""
    image_id: str = "image_id"
    """CSV only: file name below `image_root`, with or without extension."""
    cohort: str | None = None
    """Public cohort of the user (for example, sign-up month), for ledger blocks; null: one
    cohort."""
    subgroup: str | None = None
    """Attribute that splits evaluation results into subgroups; null: no subgroups."""


ENDINGS = {
    "parquet": re.compile(r"\.(parquet|pq)$", re.IGNORECASE),
    "tfrecord": re.compile(r"[._-]tfrecords?[-0-9of*?\[\]]*(\.(gz|gzip))?$", re.IGNORECASE),
    "csv": re.compile(r"\.csv$", re.IGNORECASE),
}
"""Pattern of file name endings for each format."""


def format_of(name: str) -> str:
    """Returns the format for a file name or address; `image_folder` if no known ending matches."""
    found = (kind for kind, ending in ENDINGS.items() if ending.search(name.rstrip("/")))
    return next(found, "image_folder")


class SourceConfig(Section):
    """Location and format of a set of images."""

    uri: Address
    """File, folder or glob; local, gs:// or s3://. `builtin`: the generated glyphs."""
    format: Literal["auto", "parquet", "tfrecord", "image_folder", "csv"] = "auto"
    """File format. `auto` uses the extension: .parquet, .tfrecord[.gz], .csv, else a
    folder per user."""
    image_root: Address | None = None
    """CSV only: folder of the image files; null: the folder that contains the CSV file."""
    columns: Columns = Columns()
    """Names of the columns to read."""
    where: dict[str, tuple[str, ...]] = Field(default={})
    """Public filter: column name -> allowed values. A record is kept only if it matches every
    column."""
    label_names: tuple[str, ...] = ()
    """Class names, indexed from 0 by the number in the label column; other numbers are not classes.
    Empty: labels are used unchanged. `fedemb init` reads the names from Hugging Face metadata."""
    label_scope: Literal["user", "global"] = "user"
    """Scope of labels. `user`: labels are valid only within one user (identities); `global`:
    classes shared by all users."""

    @property
    def file_format(self) -> str:
        """Returns the format; `auto` is resolved from the ending of the address."""
        return format_of(self.uri) if self.format == "auto" else self.format


class BuiltinData(Section):
    """Generated glyph data for `make run`: each identity is a random stroke glyph."""

    users: Annotated[int, Field(ge=100, le=10_000_000)] = 32_000
    """Number of private identities to generate."""
    images_per_user: Annotated[int, Field(ge=1, le=100)] = 4
    """Number of images per identity, with jitter in pose, thickness and noise."""
    classes: Annotated[int, Field(ge=0, le=500)] = 0
    """Number of shared glyphs, which every user writes in an individual handwriting; 0: each user
    is one glyph."""
    public_classes: Annotated[int, Field(ge=2, le=10_000)] = 64
    """Number of classes in the small public set, drawn in another stroke style."""
    public_images_per_class: Annotated[int, Field(ge=2, le=1000)] = 8
    """Number of images per public class."""
    seed: NonNegativeInt = 0
    """Random seed. The same seed gives the same bytes."""


class DataConfig(Section):
    """Settings of the private images."""

    source: SourceConfig
    """Source of the private images."""
    builtin: BuiltinData = BuiltinData()
    """Generated glyph data; used only if `source.uri` is `builtin`."""
    max_bad_fraction: Fraction = 0.01
    """Maximum share of bad records for `fedemb check-data`. The pipeline itself does not check
    it."""


class EvaluationByHash(Section):
    """Holds out users, and classes if they are shared, by keyed hash."""

    by: Literal["hash"] = "hash"
    fraction: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.1
    """Expected share of held-out users (and of held-out shared classes), between 0 and 1."""
    classes: tuple[str, ...] = ()
    """Public list of all shared classes. A share `fraction` of them, at least two, is held out by
    keyed hash; classes not listed are dropped. Empty: each class is drawn independently, which
    suits many classes."""


class EvaluationByValue(Section):
    """Holds out every record with one of the named values, e.g. alphabets."""

    by: Literal["value"]
    column: str
    """Column whose value decides. Each user and class is assumed to have only one value."""
    values: tuple[str, ...] = Field(min_length=1)
    """Held-out values."""


class PartitionConfig(Section):
    """Assignment of users to virtual clients. All numbers here are public constants."""

    virtual_clients: PositiveInt
    """Number of virtual clients per grouping (G). A fixed policy value; never derive it from the
    exact user count."""
    groupings: Annotated[int, Field(ge=1, le=10_000)] = 1
    """Number of independent groupings (R). Round r uses grouping r mod R."""
    max_images_per_user: PositiveInt = 64
    """Maximum number of images kept per user, in keyed-hash order. Other images are dropped and
    counted."""
    evaluation: EvaluationByHash | EvaluationByValue = Field(
        default=EvaluationByHash(), discriminator="by"
    )
    """Rule that selects the users and classes held out for evaluation."""
    cohorts: tuple[str, ...] = (ONE_COHORT,)
    """Cohorts that this run may read. Users of other cohorts are skipped."""
    blocks_per_cohort: Annotated[int, Field(ge=1, le=1000)] = 1
    """Number of hash buckets per cohort. A ledger block is cohort/bucket and never changes."""
    shards: Annotated[int, Field(ge=1, le=10_000)] = 4
    """Number of output files."""
