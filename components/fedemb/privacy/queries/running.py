"""One attempt of one run: sampler, clipping, noise and accounting in one object."""

# tensorflow-privacy ships no types; the project's own signatures are checked.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, TypedDict

import numpy as np
import numpy.typing as npt
from dp_accounting import dp_event as dpe
from typing_extensions import override

from fedemb.errors import PlanMismatch, Refused
from fedemb.privacy.mechanisms.mechanism import MechanismPlan
from fedemb.privacy.queries.arrays import Array, Parameters
from fedemb.privacy.queries.clipped_sum import ClippedSum, Record
from fedemb.privacy.randomness.keyed_noise import KeyedNoise
from fedemb.privacy.randomness.noise import run_key
from fedemb.privacy.randomness.sampling import Index, VirtualClient

if TYPE_CHECKING:
    from fedemb.privacy.queries.dp_query import normalized_query

STATE_SCHEMA = "fedemb/mechanism_state/2"


class RoundState(TypedDict):
    """State of a mechanism after a round, as its record stores it; holds no un-noised value."""

    schema: str
    plan: str
    """Digest of the plan."""
    next_round: int
    tag: str
    """Keyed tag of the last round, hex."""


class MechanismState(RoundState):
    """State from which a mechanism resumes, as a checkpoint stores it."""

    tags: list[str]
    """Tags of all rounds, if later noise depends on them."""


def with_tags(state: RoundState, tags: Iterable[bytes]) -> MechanismState:
    """Returns the state from which a mechanism resumes after a round.

    Args:
      state: state in the record of the round.
      tags: tags of all rounds up to it, if later noise depends on them.
    """
    return MechanismState(**state, tags=[tag.hex() for tag in tags])


@dataclass(frozen=True)
class RoundOutput:
    """The released values of a round; visible only once the round's record is created."""

    mean: npt.NDArray[np.float32]
    """Noised sum / public normalizer, `[dim]`. The rounding to float32 is part of the protection,
    see docs/privacy/noise.md#normals."""
    event: dpe.DpEvent
    """Event of the round; unsupported if only the whole run has an event."""
    sums_sha: str
    """SHA-256 of the noised sum: public, identifies this output in the round's record."""


class Mechanism:
    """Sampler, clipping, noise and accounting of one attempt; see `build_mechanism`."""

    def __init__(self, plan: MechanismPlan, coin_key: bytes, noise: KeyedNoise):
        self.plan = plan
        self._noise = noise
        self._sum = ClippedSum(plan, noise)
        self._sampler = plan.sampler(coin_key)
        self._next_round = 0

    def sample_clients(self, round_index: int, index: Index) -> list[VirtualClient]:
        """Draws the virtual clients of a round; raises as `Sampler.sample`."""
        return self._sampler.sample(round_index, index)

    @cached_property
    def query(self) -> normalized_query.NormalizedQuery:
        """Returns the mechanism as a DPQuery of tensorflow-privacy, for TensorFlow engines."""
        from fedemb.privacy.queries.dp_query import ClippedSumQuery, normalized

        return normalized(ClippedSumQuery(self.plan, self._noise, self._sum), self.plan)

    def record(self, params: Parameters, update: Sequence[Array]) -> Record:
        """Returns the contribution of one virtual client or unit; see `ClippedSum.record`."""
        return self._sum.record(params, update)

    def require_drawable(self, dim: int) -> None:
        """Raises PlanMismatch if sums of `dim` entries need more noise than is accounted for."""
        self._noise.require_drawable(dim)

    @property
    def clip(self) -> Parameters:
        """Clip of records, float64 scalar."""
        return np.float64(self.plan.l2_norm_clip)

    def initial_sample_state(self, dim: int) -> Record:
        """Returns an empty sum for records of `dim` entries in all."""
        return self._sum.zeros(dim)

    def aggregate(self, round_index: int, sample_state: Record) -> RoundOutput:
        """Noises the sum of a round and divides it by the public normalizer.

        Must be called for every round, including rounds without participants: the noise hides that
        the round was empty.

        Args:
          round_index: the round.
          sample_state: accumulated records, started with `initial_sample_state`.

        Raises:
          PlanMismatch: the round is not planned, or rounds depend on each other and it is not the
              next one.
        """
        if not 0 <= round_index < self.plan.rounds:
            raise PlanMismatch(
                f"Round {round_index} is not one of the {self.plan.rounds} planned rounds. Plan "
                "and reserve a longer run."
            )
        # Rounds of plain mechanisms are independent and may start anywhere.
        if self.plan.tracks_participation and round_index != self._next_round:
            raise PlanMismatch(
                f"Round {round_index} is not the next round, {self._next_round}. Restore the "
                "mechanism's state from the last committed round."
            )
        noised = self._sum.noised(round_index, np.asarray(sample_state[0], np.int64))
        self._next_round = round_index + 1
        # Divided by a public constant, because the number of participants is private.
        mean = (noised / self.plan.normalizer).astype(np.float32)
        digest = hashlib.sha256(mean.tobytes()).hexdigest()
        return RoundOutput(mean, self.plan.round_event, digest)

    def round_state(self) -> RoundState:
        """Returns the state after the last round, without the tags of earlier rounds."""
        return {
            "schema": STATE_SCHEMA,
            "plan": self.plan.digest,
            "next_round": self._next_round,
            "tag": self._noise.tag.hex(),
        }

    @property
    def tags_sha(self) -> str | None:
        """Digest of the tags of all rounds, see `TagChain`; None: rounds are independent."""
        return self._noise.chain.sha if self.plan.tracks_participation else None

    def state_to_json(self) -> MechanismState:
        """Returns the state after the last round: the next round, keyed tags.

        Contains no un-noised value. Correlated noise is redrawn from the root key and the tags of
        earlier rounds; without the root key the tags are random bytes.
        """
        return with_tags(self.round_state(), self._noise.tags)

    def restore(self, state: MechanismState) -> None:
        """Resumes after the round that `state_to_json` was called after.

        Raises:
          PlanMismatch: the state belongs to another plan or is incomplete.
        """
        tags = [bytes.fromhex(tag) for tag in state.get("tags", ())]
        next_round = int(state.get("next_round", -1))
        wanted = next_round if self.plan.tracks_participation else 0
        same = state.get("schema") == STATE_SCHEMA and state.get("plan") == self.plan.digest
        if not same or next_round < 0 or len(tags) != wanted:
            raise PlanMismatch(
                "The mechanism's state belongs to another plan or is incomplete. Resume from the "
                "checkpoint of this attempt, or reserve a new one."
            )
        self._noise.restore(tags)
        self._next_round = next_round

    def rewind(self, state: MechanismState | None) -> None:
        """Rewinds to an earlier round, from its `state_to_json`; None: to the start.

        Sampling and clipping may then be repeated; the noise of correlated rounds must not be
        repeated.
        """
        start = MechanismState(
            schema=STATE_SCHEMA,
            plan=self.plan.digest,
            next_round=0,
            tag="",
            tags=[],
        )
        self.restore(state or start)


def build_mechanism(
    plan: MechanismPlan, root_key: bytes, run_id: str, attempt: int, inputs_sha: str
) -> Mechanism:
    """Returns the mechanism of one attempt, under the attempt's own keys.

    Args:
      plan: planned and reserved mechanism.
      root_key: 32 secret bytes of the reservation.
      run_id: id of the run.
      attempt: the attempt of the run, from its reservation.
      inputs_sha: digest of all inputs; other inputs give other coins and noise.
    """
    ids = (run_id, attempt, inputs_sha)
    noise = KeyedNoise(plan, run_key(root_key, "noise", *ids))
    return Mechanism(plan, run_key(root_key, "coins", *ids), noise)


class KeylessMechanism(Mechanism):
    """Clips and sums without keys, for rehearsals and other hosts; draws neither coins nor noise.

    Args:
      plan: the mechanism.
    """

    def __init__(self, plan: MechanismPlan):
        super().__init__(plan, bytes(32), KeyedNoise(plan, bytes(32)))

    @override
    def sample_clients(self, round_index: int, index: Index) -> list[VirtualClient]:
        """Always raises: coins under a public key protect no one."""
        raise Refused(_KEYLESS)

    @override
    def aggregate(self, round_index: int, sample_state: Record) -> RoundOutput:
        """Always raises: noise under a public key can be removed."""
        raise Refused(_KEYLESS)


_KEYLESS = (
    "This mechanism has no keys and draws neither coins nor noise. Use the mechanism of the "
    "attempt."
)
