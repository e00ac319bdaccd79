"""Interface of a public backbone that is known by name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

from fedemb.errors import ConfigError
from fedemb.models.public_backbone.built import Built, write_built
from fedemb.models.public_backbone.card import BackboneCard


@dataclass(frozen=True)
class Named(ABC):
    """A public backbone that `fedemb backbone get` knows by name."""

    name: str
    architecture: str
    size: int
    """Height and width in pixels that the weights were trained on."""
    least: int
    """Smallest height and width that the network accepts."""
    features: int
    parameters: int
    """Number of weights without the classifier."""
    licence: str
    provenance: str

    @property
    @abstractmethod
    def origin(self) -> str:
        """Returns the package of the weights, or where they are downloaded from."""

    @property
    @abstractmethod
    def ready(self) -> bool:
        """Returns whether the weights are installed."""

    @abstractmethod
    def build(self, size: int, weights: Path | None) -> Built:
        """Returns the network with its weights.

        Args:
          size: height and width of the input images.
          weights: file of the weights; None: the installed package, or a download.

        Raises:
          InputError: the weights are missing.
          ArtifactError: the weights are not those of this backbone.
        """

    def write(
        self, output: Path, size: int | None = None, weights: Path | None = None
    ) -> BackboneCard:
        """Writes the backbone file and returns its card.

        Args:
          output: file to write.
          size: height and width of the input images; None: those of the training.
          weights: as for `build`.

        Raises:
          ConfigError: the size is below the smallest one.
          InputError: the weights are missing.
          ArtifactError: the weights are not those of this backbone.
        """
        size = self.size if size is None else size
        if size < self.least:
            raise ConfigError(
                f"--size is {size}, and {self.name} needs images of at least {self.least} pixels. "
                f"Pass --size {self.least} or more"
            )
        return write_built(
            self.build(size, weights),
            output,
            name=self.name,
            architecture=self.architecture,
            licence=self.licence,
            provenance=self.provenance,
        )
