"""A mechanism that clips, sums and adds noise with a third party's query."""

# TensorFlow and tensorflow-privacy ship no types; the project's own signatures are checked.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from typing import Any, cast

import numpy as np
import numpy.typing as npt
from dp_accounting import dp_event as dpe
from dp_accounting.privacy_accountant import NeighboringRelation
from typing_extensions import override

from fedemb.errors import Refused
from fedemb.privacy.mechanisms.mechanism import MechanismPlan
from fedemb.privacy.queries.arrays import Parameters
from fedemb.privacy.queries.clipped_sum import Record
from fedemb.privacy.queries.dp_query import empty, flat, normalized
from fedemb.privacy.queries.protocol import dp_query
from fedemb.privacy.queries.running import Mechanism, RoundState
from fedemb.privacy.randomness.keyed_noise import KeyedNoise


class QueryMechanism(Mechanism):
    """A mechanism that clips, sums and adds noise with a third party's query.

    Args:
      plan: plan that accounts for the query's declared guarantee.
      coin_key: key of the sampler.
      noise: noise source of the run; unused by the query.
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
    def sample_params(self) -> Parameters:
        """See `Mechanism`."""
        return cast("Parameters", self.query.derive_sample_params(self._state))

    @override
    def initial_sample_state(self, dim: int) -> Record:
        """See `Mechanism`."""
        return cast("Record", self.query.initial_sample_state((empty(dim),)))

    @override
    def _noised_mean(
        self, round_index: int, sample_state: Record
    ) -> tuple[npt.NDArray[np.float64], dpe.DpEvent]:
        noised: Any = self.query.get_noised_result(sample_state, self._state)
        result, self._state, event = noised
        return flat(result), event

    @override
    def round_state(self) -> RoundState:
        """See `Mechanism`.

        Raises:
          Refused: the query has its own state.
        """
        if self._state.numerator_state != ():
            raise Refused(
                f"{type(self.query).__name__} has state that cannot be stored. Use a query without "
                "state, or run without resuming."
            )
        return super().round_state()


def require_declared(plan: MechanismPlan, query: dp_query.SumAggregationDPQuery) -> None:
    """Rejects a query that declares no guarantee, or one that differs from the plan.

    A query declares `l2_sensitivity: float` (of one virtual client), `neighboring_relation:
    NeighboringRelation` and `round_event: DpEvent`.

    Raises:
      Refused: an attribute is missing or differs from the plan, or the plan's noise is correlated
          across rounds, which a query of single rounds does not support.
    """
    if plan.tracks_participation:
        raise Refused(
            f"The noise of {plan.kind} is correlated across rounds, which "
            f"{type(query).__name__} does not support. Plan a mechanism with independent noise."
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
                f"{type(query).__name__} declares {name}={declared}, but the plan accounts for "
                f"{value}. Correct the query's attribute {name}, or plan the declared guarantee."
            )
