"""Buffered linear Toeplitz noise: parameters, sensitivity, stream.

C is lower-triangular Toeplitz with first column 1, then sum_j scale_j * decay_j^(i-1). The released
value is C^-1 (C X + Z) = X + C^-1 Z, whose noise needs one buffer per decay (McMahan et al., arXiv
2408.08868, algorithm 3). jax-privacy finds the parameters when the run is planned; all values that
the guarantee depends on are recomputed here in numpy.
"""

# The numeric libraries ship no types; the project's own signatures are checked.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from jaxtyping import Float64

from fedemb.errors import ConfigError

Floats = npt.NDArray[np.float64]


def optimise(
    rounds: int, min_separation: int, max_participations: int, buffers: int
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Finds the decays and scales of least mean error with jax-privacy; seconds to a minute.

    Returns:
      Decays and scales, `buffers` each.

    Raises:
      ConfigError: the optimiser found no usable result, or its sensitivity differs from ours.
    """
    import jax
    from jax_privacy.matrix_factorization import buffered_toeplitz, toeplitz

    with jax.enable_x64(True):
        found = buffered_toeplitz.optimize(
            n=rounds,
            min_sep=min_separation,
            max_participations=max_participations,
            max_buffers=buffers,
            min_buffers=buffers,
            error="mean",
        )
        decay = tuple(float(value) for value in np.asarray(found.buf_decay))
        scale = tuple(float(value) for value in np.asarray(found.output_scale))
        squared = toeplitz.minsep_sensitivity_squared(
            found.toeplitz_coefs(rounds), min_separation, max_participations
        )
        theirs = math.sqrt(float(squared))
    check(decay, scale)
    ours = sensitivity(coefficients(decay, scale, rounds), min_separation, max_participations)
    if not math.isclose(ours, theirs, rel_tol=1e-6):
        raise ConfigError(
            f"the sensitivity by jax-privacy {theirs:.9g} differs from the recomputed {ours:.9g} "
            "for this BLT; plan with another number of buffers"
        )
    return decay, scale


def check(decay: Sequence[float] | None, scale: Sequence[float] | None) -> None:
    """Checks that the sensitivity formula holds for the parameters.

    Raises:
      ConfigError: not the same number of finite decays in (0, 1) and scales >= 0.
    """
    usable = (
        decay is not None
        and scale is not None
        and len(decay) == len(scale) > 0
        and all(0 < value < 1 for value in decay)
        and all(0 <= value < math.inf for value in scale)
    )
    if not usable:
        raise ConfigError(
            f"Toeplitz noise needs equally many decays in (0, 1) and scales >= 0, got {decay} and "
            f"{scale}; plan the run again"
        )


def coefficients(
    decay: Sequence[float], scale: Sequence[float], rounds: int
) -> Float64[np.ndarray, "{rounds}"]:
    """Returns the first column of C, `[rounds]`."""
    powers = np.power.outer(np.asarray(decay), np.arange(rounds - 1))
    return np.concatenate([[1.0], np.asarray(scale) @ powers])


def inverse_coefficients(
    decay: Sequence[float], scale: Sequence[float], rounds: int
) -> Float64[np.ndarray, "{rounds}"]:
    """Returns the first column of C^-1, `[rounds]`: the response of the stream to one impulse."""
    stream = NoiseStream(decay, scale, 1)
    impulse = np.eye(rounds, 1)
    return np.concatenate([stream.next(row) for row in impulse])


def sensitivity(
    column: Float64[np.ndarray, " rounds"], min_separation: int, max_participations: int
) -> float:
    """Returns the L2 sensitivity of C X per unit of change, under bounded participation.

    For a Toeplitz matrix with non-negative, non-increasing coefficients, the worst pattern
    participates at round 0 and then every `min_separation` rounds (Kalinin and Lampert, arXiv
    2405.13763, theorem 2), always in the same direction.

    Args:
      column: first column of C, `[rounds]`.
      min_separation: minimum difference between the round numbers of two participations.
      max_participations: maximum number of participations.

    Raises:
      ConfigError: the coefficients increase somewhere or are negative.
    """
    if not (np.all(column >= 0) and np.all(np.diff(column) <= 1e-12)):
        raise ConfigError(
            "the coefficients of the Toeplitz matrix increase or are negative, so its sensitivity "
            "is unknown; plan with another number of buffers"
        )
    total = np.zeros_like(column)
    for start in range(0, len(column), min_separation)[:max_participations]:
        total[start:] += column[: len(column) - start]
    return float(np.linalg.norm(total))


class NoiseStream:
    """Yields rows of C^-1 Z one by one; its only state is one buffer per decay."""

    def __init__(self, decay: Sequence[float], scale: Sequence[float], size: int):
        self._decay = np.asarray(decay)
        self._scale = np.asarray(scale)
        self._buffers = np.zeros((len(self._decay), size))

    def next(self, fresh: Floats) -> Floats:
        """Takes row t of Z, `[size]`, and returns row t of C^-1 Z."""
        out = fresh - self._scale @ self._buffers
        self._buffers *= self._decay[:, None]
        self._buffers += out
        return out
