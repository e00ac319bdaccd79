"""Field types of documents: digests, names, counts, estimates. Free text is not allowed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from fedemb.config.policy import Unit
from fedemb.foundation.canonical_json import JsonObject
from fedemb.foundation.document import Part

Sha = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
"""SHA-256, or a keyed commitment."""
Name = Annotated[str, StringConstraints(max_length=256, pattern=r"^[^\x00-\x1f\x7f]*$")]
"""One short line: an ID, a version, or the name of a setting."""
Address = Annotated[str, StringConstraints(max_length=8192)]
Code = Annotated[str, StringConstraints(pattern=r"^[a-z0-9_]{1,64}$")]
"""Code from which the displayed text is looked up."""

SubgroupName = Annotated[str, StringConstraints(pattern=r"^[\w .()+/-]{1,64}$")]
"""Name of a class as in the configuration, or of a group of users as in the data."""
Time = Annotated[str, StringConstraints(pattern=r"^[0-9T:.+-]{19,40}$")]
"""Time in UTC, ISO 8601."""
Count = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Delta = Annotated[float, Field(gt=0, lt=1)]
Epsilon = Annotated[float, Field(ge=0)] | None
"""Epsilon, at least 0; None: infinite, no guarantee."""
Purpose = Literal["release", "simulation"]
if TYPE_CHECKING:
    AnyJson = JsonObject
    """JSON object that is compared as a whole with a recomputed one."""
else:
    AnyJson = dict[str, Any]  # `strict_json` checked the values
Rate = Annotated[str, StringConstraints(pattern=r"^[0-9.e-]{1,12}$")]
"""A false accept or false positive rate, as the name of a field."""
Depth = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,6}$")]
"""The k of recall@k, as the name of a field."""


class Spread(Part):
    """95 % interval of a number in another field."""

    low: float
    high: float

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if not self.low <= self.high:
            raise ValueError("the upper bound of the interval is below its lower bound")
        return self


class Interval(Spread):
    """A number with a 95 % interval; `Estimate.to_json`."""

    value: float


def points(change: Interval | None) -> str:
    """Formats a difference of two shares with its interval: `+1.2 points [+0.4, +2.0]`."""
    if change is None:
        return "not measured"
    low, high = 100 * change.low, 100 * change.high
    return f"{100 * change.value:+.1f} points [{low:+.1f}, {high:+.1f}]"


class Tensor(Part):
    """Name and shape of a model tensor."""

    name: Name
    shape: list[Count]


class Guarantee(Part):
    """(epsilon, delta) of one user and its computation; `PrivacyGuarantee.to_json`."""

    epsilon: Epsilon
    delta: Delta
    relation: Name
    accountant: Name
    rounds: Count | None
    sampler_delta: float
    unit: Unit
