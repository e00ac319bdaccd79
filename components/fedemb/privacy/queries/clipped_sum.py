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
from typing_extensions import override

from fedemb.errors import ConfigError
from fedemb.privacy.mechanisms.mechanism import MechanismPlan
from fedemb.privacy.mechanisms.section import AdaptiveClipConfig
from fedemb.privacy.queries.arrays import Array, Parameters
from fedemb.privacy.randomness.keyed_noise import KeyedNoise, grid_scale
from fedemb.privacy.randomness.noise import Integers

Record = tuple[Array, ...]
"""`(update,)`, or `(update, below)` with an adaptive clip: int64 `[dim]` and int64 scalar, tensors
of the backend or numpy."""

_CLIP_SLACK = 2.0**-26
"""Relative margin inside the ball, so that float64 rounding of clipped vectors cannot leave it."""
_CLIP_RANGE = 2.0**20
"""Maximum factor between an adaptive clip and the first one."""


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

    def clip_of(self, l2_norm_clip: float) -> float:
        """Returns a clip as this sum stores it between rounds."""
        return l2_norm_clip

    def zeros(self, dim: int) -> tuple[Integers, ...]:
        """Returns an empty sum of records of `dim` entries in all."""
        return (np.zeros(dim, np.int64),)

    def record(self, clip: Parameters, update: Sequence[Array]) -> Record:
        """Returns the contribution of a virtual client or unit to the sums; may be traced.

        Args:
          clip: float64 scalar.
          update: update of every released variable, any float dtypes and shapes, `dim` in all.
        """
        return (self._clip(clip, update)[0],)

    def _clip(self, clip: Parameters, update: Sequence[Array]) -> tuple[Any, Any]:
        """Returns the integer update, `[dim]`, and its original norm, float64; 0 if not finite."""
        ops = _exact_ops()
        flat = ops.concatenate([ops.reshape(ops.cast(t, "float64"), (-1,)) for t in update])
        norm = ops.sqrt(ops.sum(ops.square(flat)))
        # Any NaN or infinity appears in the norm; a branch on values, never a retry.
        finite = ops.isfinite(norm)
        norm = ops.where(finite, norm, ops.zeros_like(norm))
        factor = self._grid / ops.maximum(clip, norm * (1.0 + _CLIP_SLACK))
        # The cast truncates toward zero, so that the norm cannot grow.
        kept = ops.where(finite, ops.multiply(flat, factor), ops.zeros_like(flat))
        return ops.cast(kept, "int64"), norm

    def noised(
        self, round_index: int, sums: Sequence[Integers], clip: float
    ) -> tuple[npt.NDArray[np.float64], float]:
        """Returns the noised sum of a round, float64 `[dim]`, and the clip of the next round.

        The sum must be rounded to float32 before release (docs/privacy/noise.md#normals).

        Args:
          round_index: the round.
          sums: exact sums of records, started with `zeros`.
          clip: clip of the records of this round.
        """
        self._noise.begin(round_index, {"update": sums[0]})
        return self._noised_sum(sums[0], clip), clip

    def _noised_sum(self, sums: Integers, clip: float) -> npt.NDArray[np.float64]:
        plan = self._plan
        if plan.tracks_participation:
            sums = self._noise.add_correlated("update", sums)
        elif plan.private:
            sums = self._noise.add("update", sums, grid_scale(plan))
        scale = np.float64(clip / self._grid)
        return sums * scale


class AdaptiveClippedSum(ClippedSum):
    """Also counts, with noise, the records below the clip, and adapts the next clip.

    One joint Gaussian event prices sum and count (docs/privacy/sensitivity.md#adaptive-clip). The
    clip moves geometrically toward a quantile of the norms, in float32 (Andrew et al., arXiv
    1905.03871, section 2.2); the count is divided by a public constant.
    """

    def __init__(self, plan: MechanismPlan, noise: KeyedNoise, settings: AdaptiveClipConfig):
        super().__init__(plan, noise)
        self._settings = settings

    @override
    def clip_of(self, l2_norm_clip: float) -> float:
        """Returns the clip rounded to float32."""
        return float(np.float32(l2_norm_clip))

    @override
    def zeros(self, dim: int) -> tuple[Integers, ...]:
        """Returns an empty sum and an empty count."""
        return (*super().zeros(dim), np.zeros((), np.int64))

    @override
    def record(self, clip: Parameters, update: Sequence[Array]) -> Record:
        """Returns the clipped update, `[dim]`, and plus or minus half a count, on the grid."""
        ops = _exact_ops()
        integers, norm = self._clip(clip, update)
        below = ops.less_equal(ops.cast(norm, "float32"), ops.cast(clip, "float32"))
        # Halves around zero: one record moves the count by a half and not by one.
        half = int(self._grid / 2)
        return integers, half * (2 * ops.cast(below, "int64") - 1)

    @override
    def noised(
        self, round_index: int, sums: Sequence[Integers], clip: float
    ) -> tuple[npt.NDArray[np.float64], float]:
        """See the base class; the new clip is a function of only noised counts."""
        update, count = sums[0], sums[1].reshape(1)
        self._noise.begin(round_index, {"update": update, "below": count})
        result = self._noised_sum(update, clip)
        scale = self._settings.count_noise_multiplier * self._grid
        noised = self._noise.add("below", count, scale)[0] / self._grid
        return result, next_clip(self._plan, self._settings, clip, noised)


def next_clip(
    plan: MechanismPlan, settings: AdaptiveClipConfig, clip: float, below: float
) -> float:
    """Returns the clip of the next round, a float32.

    Args:
      plan: the mechanism.
      settings: settings of the adaptive clip.
      clip: clip of this round.
      below: noised count of records below it, each a half above or below zero.
    """
    share = np.float32(below) / np.float32(plan.normalizer)
    share = np.clip(share + np.float32(0.5), np.float32(0.0), np.float32(1.0))
    step = np.float32(settings.learning_rate) * (share - np.float32(settings.target_quantile))
    first, moved = plan.l2_norm_clip, float(np.float32(clip) * np.exp(-step))
    return float(np.float32(np.clip(moved, first / _CLIP_RANGE, first * _CLIP_RANGE)))


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


def clipped_sum(plan: MechanismPlan, noise: KeyedNoise) -> ClippedSum:
    """Returns the sum for a plan."""
    if plan.adaptive_clip is not None:
        return AdaptiveClippedSum(plan, noise, plan.adaptive_clip)
    return ClippedSum(plan, noise)
