"""Base classes of the mechanisms' configuration sections."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Protocol

from pydantic import Field, PositiveInt

from fedemb.foundation.section import Section
from fedemb.privacy.accounting.units import Unit

MOST_NOISE = 1e6
"""Maximum noise multiplier of plans and of searches."""


class PolicySettings(Protocol):
    """Settings of `RunConfig.policy` that a mechanism reads."""

    @property
    def unit(self) -> Unit:
        """Unit of privacy."""
        ...

    @property
    def users_lower_bound(self) -> int:
        """Public lower bound on the number of users."""
        ...


class PartitionSettings(Protocol):
    """Settings of `RunConfig.partition` that a mechanism reads."""

    @property
    def virtual_clients(self) -> int:
        """Virtual clients per grouping."""
        ...

    @property
    def groupings(self) -> int:
        """Independent groupings."""
        ...

    @property
    def max_images_per_user(self) -> int:
        """Largest number of images of one user."""
        ...


class ModelSettings(Protocol):
    """Settings of `RunConfig.model` that a mechanism reads."""

    @property
    def trainable(self) -> str:
        """Layers that train, such as `head`."""
        ...


class UnitGradientSettings(Protocol):
    """Settings of `RunConfig.training.unit_gradient` that a mechanism reads."""

    @property
    def images_per_unit(self) -> int:
        """Images of a unit in one gradient."""
        ...


class TrainingSettings(Protocol):
    """Settings of `RunConfig.training` that a mechanism reads."""

    @property
    def unit_gradient(self) -> UnitGradientSettings:
        """Settings of per-unit gradients."""
        ...


class RunSettings(Protocol):
    """What a mechanism reads from the configuration of a run; `RunConfig` implements it."""

    @property
    def task(self) -> str:
        """`embedding` or `classification`."""
        ...

    @property
    def policy(self) -> PolicySettings:
        """Budget and unit."""
        ...

    @property
    def partition(self) -> PartitionSettings:
        """Virtual clients."""
        ...

    @property
    def model(self) -> ModelSettings:
        """Network."""
        ...

    @property
    def training(self) -> TrainingSettings:
        """Optimization."""
        ...

    @property
    def mechanism(self) -> MechanismConfig:
        """Section of the mechanism."""
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

    def check_run(self, config: RunSettings) -> None:
        """Checks this section against the other sections of a run.

        Raises:
          ValueError: they contradict each other.
        """
        if config.policy.unit == "image" and not self.samples_units:
            raise ValueError(
                f"mechanism.kind={self.kind} groups users and does not support policy.unit=image. "
                "Set mechanism.kind: poisson_gaussian, or policy.unit: user."
            )


class NoisedConfig(MechanismConfig):
    """A mechanism that adds noise."""

    noise_multiplier: Annotated[float, Field(ge=1e-3, le=MOST_NOISE)]
    """Standard deviation of the noise on the SUM of updates / l2_norm_clip (sigma)."""
