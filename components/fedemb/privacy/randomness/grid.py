"""The integer grid of updates and noise, and its capacity in a 64-bit word."""

from __future__ import annotations

import math

from fedemb.errors import ConfigError

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
