"""Defaults of `fedemb init` for each kind of training."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Recipe:
    """Defaults for one kind of training.

    Attributes:
      users_per_client: mean number of users per virtual client.
      rounds: training rounds.
      sampling_probability: smallest probability that a virtual client is in a round.
      backbone: `model.backbone`.
      trainable: `model.trainable`.
    """

    users_per_client: int
    rounds: int
    sampling_probability: float
    backbone: str
    trainable: str

    def model_section(self) -> dict[str, object]:
        """Returns settings of the section `model`."""
        if self.trainable == "all":
            return {"backbone": self.backbone}
        return {"backbone": self.backbone, "embedding_dim": 64, "trainable": self.trainable}


WHOLE_NET = Recipe(32, 30, 0.1, "resnet8", "all")
FROZEN_BACKBONE = Recipe(6, 8, 0.5, "imported", "projection")
"""For 1,000 to 10,000 users, see docs/how_to/public_backbone.md."""
