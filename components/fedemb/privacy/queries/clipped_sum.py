"""Clipped sums: clip in float64, truncate to the grid, sum exactly, add keyed noise.

A record is clipped in float64, truncated toward zero onto multiples of clip / 2^grid_bits and
summed in int64, which is exact and has no order. Noise is added on the host to the exact sums,
under a key that depends on those sums.

The clipping is written in `keras.ops` and traced by the training backend; the rest is numpy.
"""

# Keras ships no types; the project's own signatures are checked.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fedemb.errors import ConfigError
from fedemb.privacy.mechanisms.mechanism import MechanismPlan
from fedemb.privacy.queries.arrays import Array, Parameters
from fedemb.privacy.randomness.keyed_noise import KeyedNoise, grid_scale
from fedemb.privacy.randomness.noise import Integers

Record = tuple[Array, ...]
"""`(update,)`: int64 `[dim]`, tensor of the backend or numpy."""

_CLIP_SLACK = 2.0**-26
"""Relative margin inside the ball, so that float64 rounding of clipped vectors cannot leave it."""


class ClippedSum:
    """Clips records to an L2 ball, sums them on an integer grid, adds keyed noise.

    Formal guarantee: the integer vector of any record has L2 norm at most 2^grid_bits.

    | record                    | contribution                          |
    |---------------------------|---------------------------------------|
    | norm at most the clip     | itself, truncated toward zero         |
    | longer                    | scaled to the clip, truncated         |
    | any NaN or infinite entry | zero                                  |
    | all zero                  | zero                                  |
    """

    def __init__(self, plan: MechanismPlan, noise: KeyedNoise):
        self._plan = plan
        self._noise = noise
        self._grid = 2.0**plan.grid_bits

    def zeros(self, dim: int) -> tuple[Integers, ...]:
        """Returns an empty sum of records of `dim` entries in all."""
        return (np.zeros(dim, np.int64),)

    def record(self, clip: Parameters, update: Sequence[Array]) -> Record:
        """Returns the contribution of a virtual client or unit to the sums; may be traced.

        Args:
          clip: float64 scalar.
          update: update of every released variable, any float dtypes and shapes, `dim` in all.
        """
        ops = _exact_ops()
        flat = ops.concatenate([ops.reshape(ops.cast(t, "float64"), (-1,)) for t in update])
        norm = ops.sqrt(ops.sum(ops.square(flat)))
        # Any NaN or infinity appears in the norm; a branch on values, never a retry.
        finite = ops.isfinite(norm)
        norm = ops.where(finite, norm, ops.zeros_like(norm))
        factor = self._grid / ops.maximum(clip, norm * (1.0 + _CLIP_SLACK))
        # The cast truncates toward zero, so that the norm cannot grow.
        kept = ops.where(finite, ops.multiply(flat, factor), ops.zeros_like(flat))
        return (ops.cast(kept, "int64"),)

    def noised(self, round_index: int, sums: Integers) -> npt.NDArray[np.float64]:
        """Returns the noised sum of a round, float64 `[dim]`.

        The sum must be rounded to float32 before release (docs/privacy/noise.md#normals).

        Args:
          round_index: the round.
          sums: exact sums of records, started with `zeros`, `[dim]`.
        """
        plan = self._plan
        self._noise.begin(round_index, {"update": sums})
        if plan.tracks_participation:
            sums = self._noise.add_correlated("update", sums)
        elif plan.private:
            sums = self._noise.add("update", sums, grid_scale(plan))
        scale = np.float64(plan.l2_norm_clip / self._grid)
        return sums * scale


def _exact_ops() -> Any:
    """Returns `keras.ops`, if it supports float64 computation.

    Raises:
      ConfigError: it would silently round to float32.
    """
    import keras

    ops: Any = keras.ops
    found = keras.backend.standardize_dtype(ops.zeros((), "float64").dtype)
    if found != "float64":
        raise ConfigError(
            f"Keras on {keras.backend.backend()} computes the clip in {found}, wanted float64; "
            "call it inside `fedemb.models.keras_backend.exact_numbers()`"
        )
    return ops
