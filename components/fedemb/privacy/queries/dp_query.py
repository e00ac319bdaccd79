"""The mechanism as a DPQuery of tensorflow-privacy: the only TensorFlow in the privacy packages.

tensorflow-privacy provides the protocol; it never draws noise
(docs/privacy/noise.md#why-no-framework-draws-the-noise): its generators repeat themselves under
XLA, depend on `tf.random.set_seed`, or are seeded from the clock.
"""

# TensorFlow and tensorflow-privacy ship no types; the project's own signatures are checked.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# The protocol's base class declares no return types, so pyright infers None for its stubs.
# pyright: reportUnknownLambdaType=false, reportIncompatibleMethodOverride=false

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf
from dp_accounting import dp_event as dpe
from typing_extensions import override

from fedemb.errors import ConfigError
from fedemb.privacy.mechanisms.mechanism import MechanismPlan
from fedemb.privacy.queries.arrays import Parameters
from fedemb.privacy.queries.clipped_sum import ClippedSum, Record
from fedemb.privacy.randomness.keyed_noise import KeyedNoise

# Its __init__ imports TF-1 estimators that no longer exist; this is its own switch to skip them.
sys.skip_tf_privacy_import = True  # pyright: ignore[reportAttributeAccessIssue]
try:
    from tensorflow_privacy.privacy.dp_query import dp_query, normalized_query
except ModuleNotFoundError as error:
    raise ConfigError(
        f"{error.name} is not installed. pip does not install it with fedemb, because it pins a "
        "dp-accounting that does not support these mechanisms. Run `pip install --no-deps "
        "tensorflow-privacy==0.9.0`, or install from the locks in requirements/."
    ) from error


class GlobalState(NamedTuple):
    """State between rounds: only noised or public numbers."""

    l2_norm_clip: tf.Tensor
    """Clip of the next round, float64 scalar."""
    round_index: tf.Tensor
    """Next round, int64 scalar."""


class ClippedSumQuery(dp_query.SumAggregationDPQuery):
    """`ClippedSum` in tensorflow-privacy's protocol.

    Clipping and summing may be traced in a `tf.function`; `get_noised_result` runs eagerly.
    """

    def __init__(self, plan: MechanismPlan, noise: KeyedNoise, rule: ClippedSum | None = None):
        self._plan = plan
        self._rule = rule or ClippedSum(plan, noise)
        self.l2_sensitivity = plan.l2_norm_clip
        self.neighboring_relation = plan.relation
        self.round_event = plan.round_event

    @override
    def initial_global_state(self) -> GlobalState:
        """Returns the first round's clip and round 0."""
        clip = self._plan.l2_norm_clip
        return GlobalState(tf.constant(clip, tf.float64), tf.constant(0, tf.int64))

    @override
    def derive_sample_params(self, global_state: GlobalState) -> Parameters:
        """Returns the clip of the round, fixed by public constants and earlier noised results."""
        return global_state.l2_norm_clip

    @override
    def preprocess_record(self, params: Parameters, record: Sequence[tf.Tensor]) -> Record:
        """Returns a virtual client's contribution; see `ClippedSum.record`.

        Args:
          params: from `derive_sample_params`.
          record: update of every released variable, any float dtypes and shapes, `dim` in all.
        """
        return self._rule.record(params, record)

    @override
    def get_noised_result(
        self, sample_state: Record, global_state: GlobalState
    ) -> tuple[tf.Tensor, GlobalState, dpe.DpEvent]:
        """Returns the noised sum, float32 `[dim]`, the next state and the event of the round.

        Rounded as `Mechanism.aggregate` rounds released values: last digits of a float64 would
        reveal the possible values of its normals (docs/privacy/noise.md#normals).
        """
        sums = np.asarray(sample_state[0], np.int64)
        result = self._rule.noised(int(global_state.round_index), sums)
        state = GlobalState(global_state.l2_norm_clip, global_state.round_index + 1)
        return tf.constant(result.astype(np.float32)), state, self._plan.round_event


def normalized(
    query: dp_query.SumAggregationDPQuery, plan: MechanismPlan
) -> normalized_query.NormalizedQuery:
    """Divides a query by a public constant, because the number of participants is private."""
    return normalized_query.NormalizedQuery(query, denominator=plan.normalizer)
