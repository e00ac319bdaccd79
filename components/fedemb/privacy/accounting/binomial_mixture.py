"""Event of a round in which a user contributes a binomial number of images."""

# dp-accounting ships no types.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dp_accounting import dp_event as dpe


def binomial_mixture(images: int, probability: float, noise_multiplier: float) -> dpe.DpEvent:
    """Returns the event of a sum of a binomial number of unit vectors, in Gaussian noise.

    Counts with a probability below 5e-324 are omitted, because no delta is that small.

    Args:
      images: maximum number of images of a user.
      probability: sampling probability of each image.
      noise_multiplier: standard deviation of the noise.
    """
    import numpy as np
    from dp_accounting import dp_event as dpe
    from scipy.stats import binom

    chances = binom.pmf(np.arange(images + 1), images, probability)
    counts = np.flatnonzero(chances)
    return dpe.MixtureOfGaussiansDpEvent(
        noise_multiplier,
        [float(count) for count in counts],
        (chances[counts] / chances.sum()).tolist(),
    )
