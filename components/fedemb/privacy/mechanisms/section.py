"""Base classes of the mechanisms' configuration sections."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Protocol

from pydantic import Field, PositiveInt

from fedemb.foundation.section import Section
from fedemb.privacy.accounting.units import Unit

MOST_NOISE = 1e6
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

    private: ClassVar[bool] = True
    """Whether the mechanism has a privacy guarantee."""
    tracks_participation: ClassVar[bool] = False
    """Whether noise is correlated across rounds, so that the guarantee depends on the number of
    participations of a virtual client."""

    samples_units: ClassVar[bool] = False
    """Whether units are sampled independently, so that a unit may be an image."""

    samples_images: ClassVar[bool] = False
    """Whether the images of a user are sampled independently, one record each."""

    solves: ClassVar[Literal["head", "projection"] | None] = None
    """Layer that is solved from second moments of the only round; None: trained by rounds."""

    kind: Any  # each mechanism has its own literal, and attributes are invariant
    """Name of the mechanism."""
    rounds: PositiveInt
    """Training rounds (T)."""
    l2_norm_clip: Annotated[float, Field(ge=1e-6, le=1e6)] = 1.0
    """Bound (C) on the L2 norm of a virtual client's update, all released variables together."""

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


class NoisedConfig(MechanismConfig):
    """A mechanism that adds noise."""

    noise_multiplier: Annotated[float, Field(ge=1e-3, le=MOST_NOISE)]
    """Standard deviation of the noise on the SUM of updates / l2_norm_clip (sigma)."""
