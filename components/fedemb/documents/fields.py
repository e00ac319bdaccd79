"""What the fields of documents may hold: digests, names, counts, estimates; and never free text."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from fedemb.config.policy import Unit
from fedemb.foundation.document import Part

Sha = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
"""SHA-256, or a keyed commitment."""
Name = Annotated[str, StringConstraints(max_length=256, pattern=r"^[^\x00-\x1f\x7f]*$")]
"""An id, a version, the name of a setting: one short line."""
Address = Annotated[str, StringConstraints(max_length=8192)]
Code = Annotated[str, StringConstraints(pattern=r"^[a-z0-9_]{1,64}$")]
"""What words are found by, when they are shown."""

SubgroupName = Annotated[str, StringConstraints(pattern=r"^[\w .()+/-]{1,64}$")]
"""A class, as the configuration lists it, or a group of people, as it stands in the data."""
Time = Annotated[str, StringConstraints(pattern=r"^[0-9T:.+-]{19,40}$")]
"""UTC, ISO 8601."""
Count = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Delta = Annotated[float, Field(gt=0, lt=1)]
Epsilon = Annotated[float, Field(ge=0)] | None
"""None: infinite, no guarantee."""
Purpose = Literal["release", "simulation"]
Json = dict[str, Any]
"""What is compared as a whole with something recomputed."""
Rate = Annotated[str, StringConstraints(pattern=r"^[0-9.e-]{1,12}$")]
"""A false accept or false positive rate, as the name of a field."""
Depth = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,6}$")]
"""The k of recall@k, as the name of a field."""
Point = Annotated[list[float], Field(min_length=2, max_length=2)]


class Spread(Part):
    """Where a number probably lies that stands in another field."""

    low: float
    high: float

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if not self.low <= self.high:
            raise ValueError("the interval ends before it begins")
        return self


class Interval(Spread):
    """A number with a 95 % interval; `Estimate.to_json`."""

    value: float


class Tensor(Part):
    """Name and shape of one tensor of a model."""

    name: Name
    shape: list[Count]


class PlantedBugs(Part):
    """What a run of the planted-bug suite found."""

    passed: Count
    total: Count
    privacy_code_sha: Sha


class Guarantee(Part):
    """(epsilon, delta) of one user and how it was computed; `PrivacyGuarantee.to_json`."""

    epsilon: Epsilon
    delta: Delta
    relation: Name
    accountant: Name
    rounds: Count | None
    sampler_delta: float
    unit: Unit


class Comparison(Part):
    """The same noise under another sampler, see `prices.figures`."""

    name: Code
    relation: Name
    epsilon: Epsilon
