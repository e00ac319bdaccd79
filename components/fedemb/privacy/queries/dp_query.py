"""The mechanism as a DPQuery of tensorflow-privacy: the only TensorFlow of the privacy rooms.

tensorflow-privacy gives the protocol; it never draws noise
(docs/privacy/noise.md#why-no-framework-draws-the-noise): its generators repeat themselves under
XLA, follow `tf.random.set_seed`, or start from the clock.
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
import numpy.typing as npt
import tensorflow as tf
from dp_accounting import NeighboringRelation
from dp_accounting import dp_event as dpe
from typing_extensions import override

from fedemb.errors import Refused
from fedemb.privacy.mechanisms.keyed_noise import KeyedNoise
from fedemb.privacy.mechanisms.mechanism import MechanismPlan
from fedemb.privacy.queries.clipped_sum import ClippedSum, Record, clipped_sum
from fedemb.privacy.queries.protocol import dp_query, normalized_query
from fedemb.privacy.queries.running import Mechanism


class GlobalState(NamedTuple):
    """State between rounds: noised or public numbers only."""

    l2_norm_clip: tf.Tensor
    """Clip of the next round, float64 scalar."""
    round_index: tf.Tensor
    """Next round, int64 scalar."""


class ClippedSumQuery(dp_query.SumAggregationDPQuery):
    """`ClippedSum` under tensorflow-privacy's protocol.

    Clipping and summing may be traced in a `tf.function`; `get_noised_result` runs eagerly.
    """

    def __init__(self, plan: MechanismPlan, noise: KeyedNoise, rule: ClippedSum | None = None):
        self._plan = plan
        self._rule = rule or clipped_sum(plan, noise)
        self.l2_sensitivity = plan.l2_norm_clip
        self.neighboring_relation = plan.relation
        self.round_event = plan.round_event

    @override
    def initial_global_state(self) -> GlobalState:
        """The first round's clip and round 0."""
        clip = self._rule.clip_of(self._plan.l2_norm_clip)
        return GlobalState(tf.constant(clip, tf.float64), tf.constant(0, tf.int64))

    @override
    def derive_sample_params(self, global_state: GlobalState) -> Any:
        """The clip of the round: fixed before it by public constants and earlier noised results."""
        return global_state.l2_norm_clip

    @override
    def preprocess_record(self, params: Any, record: Sequence[tf.Tensor]) -> Record:
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
        """Returns the noised sum, float64 `[dim]`, the next state and the event of the round."""
        sums = [np.asarray(part, np.int64) for part in sample_state]
        result, clip = self._rule.noised(
            int(global_state.round_index), sums, float(global_state.l2_norm_clip)
        )
        state = GlobalState(tf.constant(clip, tf.float64), global_state.round_index + 1)
        return tf.constant(result, tf.float64), state, self._plan.round_event


def normalized(query: dp_query.SumAggregationDPQuery, plan: MechanismPlan) -> Any:
    """Divided by a public constant: the number who showed up is private."""
    return normalized_query.NormalizedQuery(query, denominator=plan.normaliser)


class QueryMechanism(Mechanism):
    """A mechanism that clips, sums and noises with a third party's query.

    Args:
      plan: prices what the query declares.
      coin_key: of the sampler.
      noise: the run's; unused by the query.
      query: see `require_declared`.
    """

    compiles = False

    def __init__(
        self,
        plan: MechanismPlan,
        coin_key: bytes,
        noise: KeyedNoise,
        query: dp_query.SumAggregationDPQuery,
    ):
        super().__init__(plan, coin_key, noise)
        require_declared(plan, query)
        self.query = normalized(query, plan)
        self._ordered = True  # its rounds may depend on each other
        self._state: Any = self.query.initial_global_state()

    @override
    def sample_params(self) -> Any:
        """See `Mechanism`."""
        return self.query.derive_sample_params(self._state)

    @override
    def initial_sample_state(self, dim: int) -> Record:
        """See `Mechanism`."""
        return cast("Record", self.query.initial_sample_state((tf.zeros([dim], tf.int64),)))

    @override
    def _noised_mean(
        self, round_index: int, sample_state: Record
    ) -> tuple[npt.NDArray[np.float64], dpe.DpEvent]:
        result, self._state, event = self.query.get_noised_result(sample_state, self._state)
        parts = [np.ravel(np.asarray(part)) for part in tf.nest.flatten(result)]
        return np.concatenate(parts), event

    @override
    def state_to_json(self) -> dict[str, Any]:
        """See `Mechanism`.

        Raises:
          Refused: the query has state of its own.
        """
        if self._state.numerator_state != ():
            raise Refused(
                f"{type(self.query).__name__} keeps state that we cannot store; use a query "
                "without state, or run without resuming"
            )
        return super().state_to_json()


def require_declared(plan: MechanismPlan, query: dp_query.SumAggregationDPQuery) -> None:
    """Refuses a query that does not say what it guarantees, or says something else than the plan.

    A query declares `l2_sensitivity: float` (of one virtual client), `neighboring_relation:
    NeighboringRelation` and `round_event: DpEvent`.

    Raises:
      Refused: an attribute is missing or differs from the plan, or the plan's noise is correlated
        across rounds, which a query of single rounds cannot make.
    """
    if plan.tracks_participation:
        raise Refused(
            f"the noise of {plan.kind} spans rounds, so no round of {type(query).__name__} has a "
            "price of its own; plan a mechanism with fresh noise each round"
        )
    wanted: dict[str, float | NeighboringRelation | dpe.DpEvent] = {
        "l2_sensitivity": plan.l2_norm_clip,
        "neighboring_relation": plan.relation,
        "round_event": plan.round_event,
    }
    for name, value in wanted.items():
        declared = getattr(query, name, None)
        if declared != value:
            raise Refused(
                f"{type(query).__name__} declares {name}={declared}, the plan prices {value}; give "
                f"the query an attribute {name} that is true, and a plan that fits"
            )
