"""The mechanism of an attempt: clipping, exact sum, noise and accounting in one object."""

# The numeric libraries are not fully typed; the project's own signatures are checked.
# pyright: reportMissingTypeStubs=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypedDict, TypeVar, runtime_checkable

import numpy as np
import numpy.typing as npt
from dp_accounting import dp_event as dpe
from typing_extensions import override

from fedemb.errors import ConfigError, PlanMismatch, Refused
from fedemb.privacy.group_mechanisms import TreeAggregation
from fedemb.privacy.mechanism import MechanismPlan
from fedemb.privacy.noise import (
    MAX_NORMALS,
    Integers,
    TagChain,
    TreeStream,
    add_rounded_noise,
    grid_scale,
    round_tag,
    run_key,
    tensor_key,
)
from fedemb.privacy.sampling import Index, VirtualClient, sample


@runtime_checkable
class Array(Protocol):
    """Array of NumPy, TensorFlow or JAX, concrete or traced."""

    @property
    def shape(self) -> object:
        """Shape, in the type of its library."""
        ...

    @property
    def dtype(self) -> object:
        """Element type, in the type of its library."""
        ...


AnyArray = TypeVar("AnyArray", bound=Array)
"""Array of one library."""
_CLIP_SLACK = 2.0**-26
"""Relative margin inside the ball, so that float64 rounding of clipped vectors cannot leave it."""


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


# One attempt of one run: sampler, clipping, noise and accounting in one object.


STATE_SCHEMA = "fedemb/mechanism_state/3"


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
    """Sampler, clipping, noise and accounting of one attempt; see `build_mechanism`.

    Formal guarantee: the integer vector of any record has L2 norm at most 2^grid_bits. Sums of
    records in int64 are exact and have no order.

    | record                    | contribution                          |
    |---------------------------|---------------------------------------|
    | norm at most the clip     | itself, truncated toward zero         |
    | longer                    | scaled to the clip, truncated         |
    | any NaN or infinite entry | zero                                  |
    | all zero                  | zero                                  |
    """

    def __init__(self, plan: MechanismPlan, coin_key: bytes, noise_key: bytes):
        self.plan = plan
        self._coin_key, self._noise_key = coin_key, noise_key
        self._grid, self._clip = 2.0**plan.grid_bits, np.float64(plan.l2_norm_clip)
        self._next_round, self._tag = 0, b""
        self._chain = TagChain()
        self._stream: TreeStream | None = None

    def sample_clients(self, round_index: int, index: Index) -> list[VirtualClient]:
        """Draws the virtual clients of a round; raises as `sampling.sample`."""
        return sample(self.plan, self._coin_key, round_index, index)

    def record(self, update: Sequence[AnyArray]) -> AnyArray:
        """Returns the contribution of a client or unit to the sum, int64 `[dim]`; may be traced.

        Args:
          update: update of every released variable, any float dtypes and shapes, `dim` in all.
        """
        ops = _exact_ops()
        flat = ops.concatenate([ops.reshape(ops.cast(t, "float64"), (-1,)) for t in update])
        norm = ops.sqrt(ops.sum(ops.square(flat)))
        # Any NaN or infinity appears in the norm; a branch on values, never a retry.
        finite = ops.isfinite(norm)
        norm = ops.where(finite, norm, ops.zeros_like(norm))
        factor = self._grid / ops.maximum(self._clip, norm * (1.0 + _CLIP_SLACK))
        # The cast truncates toward zero, so that the norm cannot grow.
        kept = ops.where(finite, ops.multiply(flat, factor), ops.zeros_like(flat))
        return ops.cast(kept, "int64")

    def require_drawable(self, dim: int) -> None:
        """Raises PlanMismatch if sums of `dim` entries need more noise than is accounted for."""
        # A tree draws at most two nodes per round.
        if 2 * dim * self.plan.rounds > MAX_NORMALS:
            raise PlanMismatch(
                f"{self.plan.rounds} rounds of {dim} values exceed the {MAX_NORMALS} normals the "
                "noise sampler is accounted for; lower rounds"
            )

    def aggregate(self, round_index: int, total: Array) -> RoundOutput:
        """Noises the sum of a round and divides it by the public normalizer.

        Must be called for every round, including rounds without participants: the noise hides that
        the round was empty.

        Args:
          round_index: the round.
          total: sum of the records, int64 `[dim]`.

        Raises:
          PlanMismatch: the round is not planned, rounds depend on each other and it is not the
              next one, or the noise sampler's share of delta would be exceeded.
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
        noised = self.noised(round_index, np.asarray(total, np.int64)) * (self._clip / self._grid)
        self._next_round = round_index + 1
        # Divided by a public constant, because the number of participants is private.
        mean = (noised / self.plan.normalizer).astype(np.float32)
        digest = hashlib.sha256(mean.tobytes()).hexdigest()
        return RoundOutput(mean, self.plan.round_event, digest)

    def noised(self, round_index: int, sums: Integers) -> Integers:
        """Returns the exact sums of a round plus its noise, `[dim]`.

        The noise is drawn under a key that depends on every sum. The result must be rounded to
        float32 before release (docs/privacy/noise.md#normals).
        """
        self.require_drawable(sums.size)
        self._tag = round_tag(self._noise_key, round_index, sums)
        key = tensor_key(self._noise_key, self._tag, "update")
        if isinstance(self.plan, TreeAggregation):
            if self._stream is None:
                self._stream = TreeStream(self.plan, sums.size)
                for tag in self._chain.tags:
                    self._stream.next(tensor_key(self._noise_key, tag, "update"))
            self._chain.append(self._tag)
            return sums + self._stream.next(key)
        return add_rounded_noise(sums, key, grid_scale(self.plan)) if self.plan.private else sums

    def round_state(self) -> RoundState:
        """Returns the state after the last round, without the tags of earlier rounds."""
        return {
            "schema": STATE_SCHEMA,
            "plan": self.plan.digest,
            "next_round": self._next_round,
            "tag": self._tag.hex(),
        }

    @property
    def tags_sha(self) -> str | None:
        """Digest of the tags of all rounds, see `TagChain`; None: rounds are independent."""
        return self._chain.sha if self.plan.tracks_participation else None

    def state_to_json(self) -> MechanismState:
        """Returns the state after the last round: the next round, keyed tags.

        Contains no un-noised value. Correlated noise is redrawn from the root key and the tags of
        earlier rounds; without the root key the tags are random bytes.
        """
        return with_tags(self.round_state(), self._chain.tags)

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
        self._next_round, self._chain, self._stream = next_round, TagChain(tags), None

    def rewind(self, state: MechanismState | None) -> None:
        """Rewinds to an earlier round, from its `state_to_json`; None: to the start.

        Sampling and clipping may then be repeated; the noise of correlated rounds must not be
        repeated.
        """
        start = MechanismState(
            schema=STATE_SCHEMA, plan=self.plan.digest, next_round=0, tag="", tags=[]
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
    return Mechanism(plan, run_key(root_key, "coins", *ids), run_key(root_key, "noise", *ids))


class KeylessMechanism(Mechanism):
    """Clips and sums without keys, for other hosts; draws neither coins nor noise.

    Args:
      plan: the mechanism.
    """

    def __init__(self, plan: MechanismPlan):
        super().__init__(plan, bytes(32), bytes(32))

    @override
    def sample_clients(self, round_index: int, index: Index) -> list[VirtualClient]:
        """Always raises: coins under a public key protect no one."""
        raise Refused(_KEYLESS)

    @override
    def aggregate(self, round_index: int, total: Array) -> RoundOutput:
        """Always raises: noise under a public key can be removed."""
        raise Refused(_KEYLESS)


_KEYLESS = (
    "This mechanism has no keys and draws neither coins nor noise. Use the mechanism of the "
    "attempt."
)
