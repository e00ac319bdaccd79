"""How many images of one user their coins bring up, as the event of a round."""

# dp-accounting ships no types.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dp_accounting import dp_event as dpe


def binomial_mixture(images: int, probability: float, noise_multiplier: float) -> dpe.DpEvent:
    """The sum of as many vectors of length 1 as `images` coins bring up, in Gaussian noise.

    Counts of a chance below 5e-324 are left out: no delta is that small.

    Args:
      images: coins.
      probability: of each.
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
