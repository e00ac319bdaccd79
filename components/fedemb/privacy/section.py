"""Configuration sections of mechanisms, the privacy unit, and the integer grid."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Protocol

from pydantic import Field, PositiveInt

from fedemb.errors import ConfigError
from fedemb.foundation.section import Section

Unit = Literal["user", "image"]
"""Privacy unit of a guarantee: a user with all of their data, or one image."""


def count_of(number: int, noun: str) -> str:
    """Returns a number with its noun.

    >>> count_of(1, "round"), count_of(2000, "round")
    ('1 round', '2,000 rounds')
    """
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


class UnitText(NamedTuple):
    """Text fragments for a privacy unit."""

    one: str
    """A unit, as in "one user more"."""
    many: str
    whole: str
    """The subject of the guarantee."""
    reach: str
    """The scope of the protection of each unit, after a comma."""
    change: str
    """The change of a unit that stays in the data, after "one user that"."""
    covered: str
    """Covered and uncovered data, in sentences."""


UNITS: dict[Unit, UnitText] = {
    "user": UnitText(
        one="user",
        many="users",
        whole="one user with everything they own",
        reach="for everything they own",
        change="changes all of their own data",
        covered="All images under one user id are covered together, however many. A person with "
        "two user ids counts as two users; images of a person in another account are not covered.",
    ),
    "image": UnitText(
        one="image",
        many="images",
        whole="one image",
        reach="each by itself",
        change="becomes another image",
        covered="Single images are covered, each separately. A person with several is protected "
        "less: k images multiply epsilon by about k. No guarantee covers a person with all of "
        "their images.",
    ),
}


# The integer grid of updates and noise, and its capacity in a 64-bit word.


GRID_BITS = 32
"""Updates and noise are multiples of clip / 2^GRID_BITS."""
MOST_GRID_BITS = 48
"""The finest grid; only for a mechanism without noise, whose sums need no room for it."""
MAX_SUM_BITS = 61
"""Sums of clipped integers, and noise, stay below 2^61 in a signed 64-bit word."""
MOST_UNITS = 2**28
"""Maximum number of individually sampled units of a store: the capacity of one sum."""
MOST_IMAGES = 8192
"""Maximum number of images of a user in a covariance, so that products of features sum exactly."""
NOISE_REACH = 14.0
"""Maximum standard deviations of a normal from `noise.gaussian`."""
CORRELATED_ROOM_BITS = 6
"""Additional bits reserved for correlated noise, which adds draws of many rounds."""


def check_room(grid_bits: int, contributions: int, noise: float, *, correlated: bool) -> None:
    """Checks that sums and noise fit in a 64-bit word.

    Args:
      grid_bits: grid bits of the plan.
      contributions: maximum number of clipped vectors in one sum.
      noise: the largest standard deviation of noise on that grid / clip.
      correlated: whether noise adds draws of many rounds.

    Raises:
      ConfigError: either could overflow.
    """
    noise_bits = grid_bits + math.log2(max(noise, 1) * NOISE_REACH)
    if correlated:
        noise_bits += CORRELATED_ROOM_BITS
    sum_bits = grid_bits + math.log2(contributions)
    if not max(noise_bits, sum_bits) < MAX_SUM_BITS:
        raise ConfigError(
            f"sums of {contributions} contributions with a noise multiplier of {noise:g} could "
            "overflow 64-bit integers; lower either"
        )


# Base classes of the mechanisms' configuration sections.


LEAST_NOISE, MOST_NOISE = 1e-3, 1e6
"""Maximum noise multiplier of plans and of searches."""


@dataclass(frozen=True, kw_only=True)
class PublicNumbers:
    """Public numbers that a mechanism reads from the other sections of a configuration."""

    virtual_clients: int
    groupings: int
    users_lower_bound: int
    max_images_per_user: int = 1
    unit: Unit = "user"
    task: str = "embedding"
    trainable: str = "all"
    """`model.trainable`."""
    images_per_unit: int = 1
    """`training.unit_gradient.images_per_unit`."""


class RunSettings(Protocol):
    """Part of the configuration that a plan reads; `RunConfig` implements it."""

    @property
    def mechanism(self) -> MechanismConfig:
        """Section of the mechanism."""
        ...

    @property
    def public_numbers(self) -> PublicNumbers:
        """Public numbers that the mechanism reads from other sections."""
        ...


class MechanismConfig(Section):
    """Base class of the sections of all mechanisms."""

    tracks_participation: ClassVar[bool] = False
    """Whether noise is correlated across rounds, so that the guarantee depends on the number of
    participations of a virtual client."""

    samples_units: ClassVar[bool] = False
    """Whether units are sampled independently, so that a unit may be an image."""

    samples_images: ClassVar[bool] = False
    """Whether the images of a user are sampled independently, one record each."""

    solves: ClassVar[bool] = False
    """Whether the projection is solved from the only round."""

    kind: Any  # each mechanism has its own literal, and attributes are invariant
    """Name of the mechanism."""
    rounds: PositiveInt
    """Training rounds (T)."""
    l2_norm_clip: Annotated[float, Field(ge=1e-6, le=1e6)] = 1.0
    """Bound (C) on the L2 norm of a virtual client's update, all released variables together."""
    noise_multiplier: Annotated[float, Field(ge=LEAST_NOISE, le=MOST_NOISE)]
    """Standard deviation of the noise on the SUM of updates / l2_norm_clip (sigma)."""

    @property
    def private(self) -> bool:
        """Whether the mechanism has a privacy guarantee."""
        return self.noise_multiplier > 0

    @classmethod
    def kind_name(cls) -> str:
        """Returns the `kind` of this class."""
        return cls.model_fields["kind"].default

    def check_run(self, numbers: PublicNumbers) -> None:
        """Checks this section against the other sections of a run.

        Raises:
          ValueError: they contradict each other.
        """
        if numbers.unit == "image" and not self.samples_units:
            raise ValueError(
                f"mechanism.kind={self.kind} groups users and does not support policy.unit=image. "
                "Set mechanism.kind: poisson_gaussian, or policy.unit: user."
            )
