"""Sum queries: clip in float64, truncate to the grid, sum exactly, add keyed noise.

A record is clipped in float64, truncated toward zero onto multiples of clip / 2^grid_bits and
summed in int64, which is exact and has no order. Noise is added on the host to the exact sums,
outside any `tf.function`, under a key that depends on those sums.
"""

# TensorFlow and tensorflow-privacy ship no types; our own signatures are checked.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# The protocol's base class declares no return types, so pyright infers None for its stubs.
# pyright: reportUnknownLambdaType=false, reportIncompatibleMethodOverride=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import tensorflow as tf
from dp_accounting import dp_event as dpe
from typing_extensions import override

from fedemb.config import AdaptiveClipConfig
from fedemb.privacy.mechanisms.keyed_noise import KeyedNoise, grid_scale
from fedemb.privacy.mechanisms.mechanism import MechanismPlan
from fedemb.privacy.mechanisms.noise import Integers
from fedemb.privacy.queries.protocol import (
    dp_query,
    normalized_query,
    quantile_estimator_query,
)

Record = tuple[tf.Tensor, ...]
"""`(update,)`, or `(update, below)` with an adaptive clip: int64 `[dim]` and int64 scalar."""

_CLIP_SLACK = 2.0**-26
"""Clipped vectors end this much inside the ball, so that float64 rounding cannot leave it."""
_CLIP_RANGE = 2.0**20
"""An adaptive clip stays within this factor of the first one."""


class GlobalState(NamedTuple):
    """State between rounds: noised or public numbers only."""

    l2_norm_clip: tf.Tensor
    """Clip of the next round, float64 scalar."""
    round_index: tf.Tensor
    """Next round, int64 scalar."""
    quantile_state: Any = ()
    """State of the quantile estimator, if the clip is adaptive."""


class ClippedSumQuery(dp_query.SumAggregationDPQuery):
    """Clips records to an L2 ball, sums them on an integer grid, adds keyed noise.

    Formal guarantee: the integer vector of any record has L2 norm at most 2^grid_bits.

    | record                    | contribution                          |
    |---------------------------|---------------------------------------|
    | norm at most the clip     | itself, truncated toward zero         |
    | longer                    | scaled to the clip, truncated         |
    | any NaN or infinite entry | zero                                  |
    | all zero                  | zero                                  |

    Clipping and summing may be traced in a `tf.function`; `get_noised_result` runs eagerly.
    """

    def __init__(self, plan: MechanismPlan, noise: KeyedNoise):
        self._plan = plan
        self._noise = noise
        self._grid = 2.0**plan.grid_bits
        self.l2_sensitivity = plan.l2_norm_clip
        self.neighboring_relation = plan.relation
        self.round_event = plan.round_event

    @override
    def initial_global_state(self) -> GlobalState:
        """The first round's clip and round 0."""
        return self.state_at(0, self._plan.l2_norm_clip)

    def state_at(self, round_index: int, l2_norm_clip: float) -> GlobalState:
        """The state before a round."""
        return GlobalState(
            tf.constant(l2_norm_clip, tf.float64), tf.constant(round_index, tf.int64)
        )

    @override
    def derive_sample_params(self, global_state: GlobalState) -> Any:
        """The clip of the round: fixed before it by public constants and earlier noised results."""
        return global_state.l2_norm_clip

    @override
    def preprocess_record(self, params: Any, record: Sequence[tf.Tensor]) -> Record:
        """Returns a virtual client's contribution.

        Args:
          params: from `derive_sample_params`.
          record: update of every released variable, any float dtypes and shapes, `dim` in all.
        """
        return (self._clip(params, record)[0],)

    def _clip(self, clip: tf.Tensor, record: Sequence[tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor]:
        """Integer update, `[dim]`, and the norm it had, float64; 0 for a non-finite one."""
        tensors = cast("list[tf.Tensor]", tf.nest.flatten(record))
        flat = tf.concat([tf.reshape(tf.cast(t, tf.float64), [-1]) for t in tensors], axis=0)
        norm = tf.sqrt(tf.reduce_sum(tf.square(flat)))
        # One NaN or infinity anywhere shows in the norm; a branch on values, never a retry.
        finite = tf.math.is_finite(norm)
        zero = tf.zeros_like(norm)
        norm = tf.where(finite, norm, zero)
        factor = self._grid / tf.maximum(clip, norm * (1.0 + _CLIP_SLACK))
        factor = tf.where(finite, factor, zero)
        # The product is 0 where the factor is, even for NaN. The cast truncates toward zero, so
        # that the norm cannot grow.
        return tf.cast(tf.math.multiply_no_nan(flat, factor), tf.int64), norm

    @override
    def get_noised_result(
        self, sample_state: Record, global_state: GlobalState
    ) -> tuple[tf.Tensor, GlobalState, dpe.DpEvent]:
        """Returns the noised sum, float64 `[dim]`, the next state and the event of the round."""
        round_index = int(global_state.round_index)
        sums = _integers(sample_state[0])
        self._noise.begin(round_index, {"update": sums})
        result = self._noised_sum(sums, float(global_state.l2_norm_clip))
        state = global_state._replace(round_index=global_state.round_index + 1)
        return result, state, self._plan.round_event

    def _noised_sum(self, sums: Integers, clip: float) -> tf.Tensor:
        plan = self._plan
        if plan.tracks_participation:
            sums = self._noise.add_correlated("update", sums)
        elif plan.private:
            sums = self._noise.add("update", sums, grid_scale(plan))
        return tf.constant(sums * (clip / self._grid), tf.float64)


class AdaptiveClippedSumQuery(ClippedSumQuery):
    """Also counts, under noise, how many records lie below the clip, and moves the next clip.

    One joint Gaussian event prices sum and count (docs/privacy/sensitivity.md#adaptive-clip).
    """

    def __init__(self, plan: MechanismPlan, noise: KeyedNoise, settings: AdaptiveClipConfig):
        super().__init__(plan, noise)
        self._quantile = _KeyedQuantile(plan, noise, settings)

    @override
    def state_at(self, round_index: int, l2_norm_clip: float) -> GlobalState:
        """The state before a round."""
        quantile = self._quantile.initial_global_state()._replace(
            current_estimate=tf.constant(l2_norm_clip, tf.float32)
        )
        clip = tf.cast(quantile.current_estimate, tf.float64)
        return GlobalState(clip, tf.constant(round_index, tf.int64), quantile)

    @override
    def derive_sample_params(self, global_state: GlobalState) -> Any:
        """Clip of the round, and the quantile estimator's parameters."""
        quantile = self._quantile.derive_sample_params(global_state.quantile_state)
        return global_state.l2_norm_clip, quantile

    @override
    def preprocess_record(self, params: Any, record: Sequence[tf.Tensor]) -> Record:
        """Returns the clipped update, `[dim]`, and plus or minus half a count, on the grid."""
        clip, quantile = params
        update, norm = self._clip(clip, record)
        return update, self._quantile.preprocess_record(quantile, tf.cast(norm, tf.float32))

    @override
    def get_noised_result(
        self, sample_state: Record, global_state: GlobalState
    ) -> tuple[tf.Tensor, GlobalState, dpe.DpEvent]:
        """As the base class; the new clip is a function of noised counts alone."""
        round_index = int(global_state.round_index)
        sums, below = _integers(sample_state[0]), _integers(sample_state[1]).reshape(1)
        self._noise.begin(round_index, {"update": sums, "below": below})
        result = self._noised_sum(sums, float(global_state.l2_norm_clip))
        estimate, _, _ = self._quantile.get_noised_result(
            sample_state[1], global_state.quantile_state
        )
        first = self._plan.l2_norm_clip
        clip = float(np.clip(float(estimate), first / _CLIP_RANGE, first * _CLIP_RANGE))
        return result, self.state_at(round_index + 1, clip), self._plan.round_event


class _KeyedQuantile(quantile_estimator_query.QuantileEstimatorQuery):
    """tensorflow-privacy's estimator with its noise replaced and a public denominator."""

    def __init__(self, plan: MechanismPlan, noise: KeyedNoise, settings: AdaptiveClipConfig):
        self._plan, self._noise, self._settings = plan, noise, settings
        super().__init__(
            initial_estimate=plan.l2_norm_clip,
            target_quantile=settings.target_quantile,
            learning_rate=settings.learning_rate,
            below_estimate_stddev=settings.count_noise_multiplier,
            expected_num_records=plan.normaliser,
            geometric_update=True,
        )

    @override
    def _construct_below_estimate_query(
        self, below_estimate_stddev: float, expected_num_records: float
    ) -> normalized_query.NormalizedQuery:
        count = _KeyedCountQuery(self._plan, self._noise, below_estimate_stddev)
        return normalized_query.NormalizedQuery(count, denominator=expected_num_records)


class _KeyedCountQuery(dp_query.SumAggregationDPQuery):
    """Sums halves, as whole numbers of the grid, and adds keyed noise."""

    def __init__(self, plan: MechanismPlan, noise: KeyedNoise, stddev: float):
        self._grid, self._noise, self._stddev = 2.0**plan.grid_bits, noise, stddev

    @override
    def preprocess_record(self, params: Any, record: tf.Tensor) -> tf.Tensor:
        return tf.cast(tf.cast(record, tf.float64) * self._grid, tf.int64)

    @override
    def get_noised_result(self, sample_state: tf.Tensor, global_state: Any) -> Any:
        count = _integers(sample_state).reshape(1)
        noised = self._noise.add("below", count, self._stddev * self._grid)
        return tf.constant(noised[0] / self._grid, tf.float32), global_state, dpe.NoOpDpEvent()


def _integers(tensor: Any) -> Integers:
    return np.asarray(tensor, dtype=np.int64)
