"""What the profile of a compiled pipeline promises a step, in environment variables."""

from __future__ import annotations

import os
from typing import Literal

from fedemb.errors import ConfigError

Backend = Literal["tensorflow", "jax"]
"""What Keras computes gradients with in a trainer."""
BACKEND = "FEDEMB_BACKEND"
"""The one backend that the profile's trainers have."""
ACCELERATOR = "FEDEMB_ACCELERATOR"
"""The kind of accelerator that the profile gives the step."""


def require_backend(name: str) -> None:
    """Refuses a configuration whose backend the trainer would not have.

    Args:
      name: `training.backend`.

    Raises:
      ConfigError: the profile has the other one alone.
    """
    only = os.environ.get(BACKEND, name)
    if only != name:
        raise ConfigError(
            f"training.backend is {name}, and the images of this pipeline train on {only}; set "
            f"training.backend: {only}, or submit to a pipeline that was compiled for the other one"
        )
