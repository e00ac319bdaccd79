"""Environment variables in which the profile of a compiled pipeline describes a step's runtime."""

from __future__ import annotations

import os
from typing import Literal

from fedemb.errors import ConfigError

Backend = Literal["tensorflow", "jax"]
"""Keras backend of a trainer."""
BACKEND = "FEDEMB_BACKEND"
"""Variable with the only backend that the profile's trainers have."""
ACCELERATOR = "FEDEMB_ACCELERATOR"
"""Variable with the kind of accelerator that the profile assigns to the step."""


def require_backend(name: str) -> None:
    """Refuses a `training.backend` that is not available in the trainer.

    Raises:
      ConfigError: the profile has only the other backend.
    """
    only = os.environ.get(BACKEND, name)
    if only != name:
        raise ConfigError(
            f"training.backend is {name}, and the images of this pipeline train on {only}; set "
            f"training.backend: {only}, or submit to a pipeline that was compiled for the other one"
        )
