"""One attempt of one run: sampler, clip, noise and price in one object."""

# TensorFlow and tensorflow-privacy ship no types; our own signatures are checked.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false

from __future__ import annotations

import hashlib
import sys
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import tensorflow as tf
from dp_accounting import NeighboringRelation
from dp_accounting import dp_event as dpe

# Its __init__ imports TF-1 estimators that no longer exist; this is its own switch against that.
sys.skip_tf_privacy_import = True  # pyright: ignore[reportAttributeAccessIssue]
from tensorflow_privacy.privacy.dp_query import dp_query, normalized_query  # noqa: E402

from fedemb.errors import PlanMismatch, Refused  # noqa: E402
from fedemb.privacy.mechanisms.keyed_noise import KeyedNoise  # noqa: E402
from fedemb.privacy.mechanisms.mechanism import MechanismPlan  # noqa: E402
from fedemb.privacy.mechanisms.noise import run_key  # noqa: E402
from fedemb.privacy.mechanisms.sampling import Index, VirtualClient  # noqa: E402
from fedemb.privacy.queries.clipped_sum import (  # noqa: E402
    AdaptiveClippedSumQuery,
    ClippedSumQuery,
    Record,
)

STATE_SCHEMA = "fedemb/mechanism_state/2"


@dataclass(frozen=True)
class RoundOutput:
    """What a round releases; it becomes visible only when its record is created."""

    mean: npt.NDArray[np.float32]
    """Noised sum / public normaliser, `[dim]`."""
    event: dpe.DpEvent
    """Price of the round; unsupported where only the whole run has one."""
    sums_sha: str
    """SHA-256 of the noised sum: public, names this output in the round's record."""


class Mechanism:
    """Sampler, clip, noise and price of one attempt of one run; see `build_mechanism`."""

    def __init__(
        self,
        plan: MechanismPlan,
        coin_key: bytes,
        noise: KeyedNoise,
        query: dp_query.SumAggregationDPQuery,
    ):
        self.plan = plan
        # Divided by a public constant: the number who showed up is private.
        self.query = normalized_query.NormalizedQuery(query, denominator=plan.normaliser)
        self._sum = query
        self._noise = noise
        self._sampler = plan.sampler(coin_key)
        self._next_round = 0
        # Rounds of plain mechanisms do not depend on each other and may start anywhere.
        own = isinstance(query, ClippedSumQuery)
        self._ordered = plan.tracks_participation or plan.adaptive_clip is not None or not own
        self.global_state: Any = self.query.initial_global_state()
        """State of the query before the next round."""

    def sample_clients(self, round_index: int, index: Index) -> list[VirtualClient]:
        """Draws the virtual clients of a round; raises as `Sampler.sample`."""
        return self._sampler.sample(round_index, index)

    def sample_params(self) -> Any:
        """Parameters for `query.preprocess_record` in the next round: tensors, safe to pass on."""
        return self.query.derive_sample_params(self.global_state)

    def initial_sample_state(self, dim: int) -> Record:
        """An empty sum for records of `dim` entries in all."""
        template: Record = (tf.zeros([dim], tf.int64),)
        if self.plan.adaptive_clip is not None:
            template = (*template, tf.zeros([], tf.int64))
        return cast("Record", self.query.initial_sample_state(template))

    @property
    def l2_norm_clip(self) -> float:
        """Clip of the next round."""
        state = self.global_state.numerator_state
        return float(getattr(state, "l2_norm_clip", self.plan.l2_norm_clip))

    def aggregate(self, round_index: int, sample_state: Record) -> RoundOutput:
        """Noises the sum of a round and divides it by the public normaliser.

        Call it for every round, also when nobody was sampled: the noise of an empty round is what
        hides that it was empty.

        Args:
          round_index: the round.
          sample_state: accumulated records, begun with `initial_sample_state`.

        Raises:
          PlanMismatch: the round is not planned, or not the next one where rounds depend on each
            other.
        """
        if not 0 <= round_index < self.plan.rounds:
            raise PlanMismatch(
                f"round {round_index} is not one of the {self.plan.rounds} planned rounds; plan and"
                " reserve a longer run"
            )
        if self._ordered and round_index != self._next_round:
            raise PlanMismatch(
                f"round {round_index} was asked for, round {self._next_round} is next; restore the "
                "mechanism's state from the last committed round"
            )
        if not self._ordered:
            self._place(round_index, self.plan.l2_norm_clip)
        result, state, event = self.query.get_noised_result(sample_state, self.global_state)
        self.global_state, self._next_round = state, round_index + 1
        flat = np.concatenate([np.ravel(np.asarray(part)) for part in tf.nest.flatten(result)])
        mean = flat.astype(np.float32)
        return RoundOutput(mean, event, hashlib.sha256(mean.tobytes()).hexdigest())

    def state_to_json(self) -> dict[str, Any]:
        """State after the last round: the next round, the noised clip, keyed tags.

        Holds nothing un-noised. Correlated noise is drawn again from the root key and the tags of
        earlier rounds; without the root key the tags are random words.

        Raises:
          Refused: the query is a third party's with state of its own.
        """
        if not isinstance(self._sum, ClippedSumQuery) and self.global_state.numerator_state != ():
            raise Refused(
                f"{type(self._sum).__name__} keeps state that we cannot store; use a query "
                "without state, or run without resuming"
            )
        return {
            "schema": STATE_SCHEMA,
            "plan": self.plan.digest,
            "next_round": self._next_round,
            "l2_norm_clip": self.l2_norm_clip,
            "tag": self._noise.tag.hex(),
            "tags": [tag.hex() for tag in self._noise.tags],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continues after the round that `state_to_json` was called after.

        Raises:
          PlanMismatch: the state is of another plan or incomplete.
        """
        tags = [bytes.fromhex(tag) for tag in state.get("tags", ())]
        next_round = int(state.get("next_round", -1))
        wanted = next_round if self.plan.tracks_participation else 0
        same = state.get("schema") == STATE_SCHEMA and state.get("plan") == self.plan.digest
        if not same or next_round < 0 or len(tags) != wanted:
            raise PlanMismatch(
                "the mechanism's state is of another plan or incomplete; resume from the checkpoint"
                " of this attempt, or reserve a new one"
            )
        self._noise.restore(tags)
        self._next_round = next_round
        self._place(next_round, float(state["l2_norm_clip"]))

    def rewind(self, state: dict[str, Any] | None) -> None:
        """Goes back to after an earlier round, given by its `state_to_json`; None: to the start.

        Sampling and clipping may then be repeated; the noise of correlated rounds may not.
        """
        start = {"schema": STATE_SCHEMA, "plan": self.plan.digest, "next_round": 0, "tags": []}
        self.restore(state or {**start, "l2_norm_clip": self.plan.l2_norm_clip})

    def _place(self, round_index: int, clip: float) -> None:
        if isinstance(self._sum, ClippedSumQuery):
            numerator = self._sum.state_at(round_index, clip)
            self.global_state = self.global_state._replace(numerator_state=numerator)


def build_mechanism(  # noqa: PLR0917 - five identify the attempt, in the order of its reservation
    plan: MechanismPlan,
    root_key: bytes,
    run_id: str,
    attempt: int,
    inputs_sha: str,
    query: dp_query.SumAggregationDPQuery | None = None,
) -> Mechanism:
    """Returns the mechanism of one attempt.

    Args:
      plan: what was planned and reserved.
      root_key: 32 secret bytes of the reservation.
      run_id: the run.
      attempt: the attempt of the run, from its reservation.
      inputs_sha: digest of everything that goes in; other inputs, other coins and noise.
      query: a third party's sum query instead of ours, see `require_declared`.

    Raises:
      Refused: a third party's query does not declare what the plan prices.
    """
    ids = (run_id, attempt, inputs_sha)
    noise = KeyedNoise(plan, run_key(root_key, "noise", *ids))
    if query is not None:
        require_declared(plan, query)
    elif plan.adaptive_clip is not None:
        query = AdaptiveClippedSumQuery(plan, noise, plan.adaptive_clip)
    else:
        query = ClippedSumQuery(plan, noise)
    return Mechanism(plan, run_key(root_key, "coins", *ids), noise, query)


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
