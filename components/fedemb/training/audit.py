"""Evidence, collected during training, that the priced mechanism is the one that runs.

The audit reads committed records, reads keys while they exist, and runs two rounds again. It does
not affect training: a run releases the same bits with or without it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypedDict, cast

import numpy as np

from fedemb.config import ServerConfig
from fedemb.documents.audit import Fold, MechanismAudit, Replay
from fedemb.documents.model import RoundLine
from fedemb.errors import ArtifactError
from fedemb.foundation.canonical_json import JsonObject, sha256_hex
from fedemb.privacy.mechanism import MechanismPlan
from fedemb.privacy.noise import TagChain
from fedemb.privacy.running import Mechanism, RoundState, with_tags
from fedemb.privacy.sampling import Index, VirtualClient
from fedemb.storage import Store
from fedemb.training.replay import AttemptKeys, NoiseReceipts, ReceiptFigures, RoundReplay
from fedemb.training.rounds import TrainingRound, Unit
from fedemb.training.server import (
    STATE_ARRAYS,
    ServerState,
    pack,
    released_weights,
    unpack,
)

_NAME = "audit.npz"
_BEFORE = "began"
"""Array of the weights before each replayed round; the name is part of the stored state."""


@dataclass(frozen=True)
class RoundRecord:
    """One committed round. Noised."""

    public: RoundLine
    """Line of the round in `rounds.jsonl`."""
    mechanism_state: RoundState
    """`Mechanism.round_state()` after the round."""
    tags_sha: str | None
    """Digest of the tags of all rounds up to it, see `TagChain`; None: rounds are independent."""
    mean: np.ndarray | None
    """float32 `[dim]`, noised mean update; None once a checkpoint covers it."""

    @property
    def index(self) -> int:
        """Number of the round, from 0."""
        return self.public.round


class _Head(TypedDict):
    """Saved state of an audit, without its arrays."""

    inputs_sha: str
    rounds: int
    began: list[int]
    """Replayed rounds that started; the name is part of the stored state."""
    named: bool
    size: int
    receipts: ReceiptFigures


class RoundAudit:
    """Collects receipts, fold, tags, and the initial weights of two rounds.

    Args:
      plan: plan of the run.
      keys: keys of the attempt.
      server: configuration of the server step.
      advance: server step on a noised mean.
      start: server state before round 0.
    """

    def __init__(
        self,
        plan: MechanismPlan,
        keys: AttemptKeys,
        server: ServerConfig,
        advance: Callable[[ServerConfig, ServerState, np.ndarray], ServerState],
        start: ServerState,
    ):
        self._plan, self._keys, self._server, self._advance = plan, keys, server, advance
        self._state = start
        self._receipts = NoiseReceipts(plan, keys.noise_key)
        self._chain = TagChain()
        self._size = 0
        self._named = True
        """Whether every public digest matches the committed mean."""
        self._chosen = keys.chosen_rounds(plan.rounds)
        self._before: dict[int, np.ndarray] = {}
        self._means: dict[int, np.ndarray] = {}
        self._replay = Replay(rounds=0, failed=[])

    @property
    def rounds(self) -> int:
        """Returns the number of audited rounds."""
        return self._state.rounds

    def add(self, record: RoundRecord) -> float:
        """Adds the next committed round; returns the slope of its noise. Raw.

        Args:
          record: record of the round, with its mean.
        """
        mean, state = record.mean, record.mechanism_state
        assert mean is not None, f"round {record.index} was audited before"
        if record.index in self._chosen:
            self._before[record.index] = self._state.weights
            self._means[record.index] = mean
        self._chain.append(bytes.fromhex(state["tag"]))
        self._chain.check(record.tags_sha)
        self._size = mean.size
        slope = self._receipts.add(mean, self._chain.tags[-1])
        self._named &= record.public.output_sha == sha256_hex(mean.tobytes())
        self._state = self._advance(self._server, self._state, mean)
        return slope

    def _shared(self, rounds: int) -> list[bytes]:
        """Returns the tags of the first rounds if later noise depends on them, else none."""
        return self._chain.tags[:rounds] if self._plan.tracks_participation else []

    def replay(
        self,
        function: TrainingRound,
        mechanism: Mechanism,
        index: Index,
        load: Callable[[VirtualClient], Unit],
        read: Callable[[int], RoundRecord | None],
    ) -> None:
        """Replays the chosen rounds, each with one of its users removed.

        The sum without the user, corrected by the difference of the user's virtual client with and
        without the user, must match the keyed digest in the round's record. Then the coins were the
        same, and no other record depended on the user. The committed mean must be that sum plus its
        noise.

        Args:
          function: rounds of the training.
          mechanism: mechanism of the training; it is rewound.
          index: the users.
          load: reads the examples of a virtual client.
          read: reads the record of a round.
        """
        failed: set[str] = set()
        chosen = [number for number in self._chosen if number in self._before]
        for number in chosen:
            tags = self._shared(number)
            before = _record(read, number - 1).mechanism_state if number else None
            mechanism.rewind(before and with_tags(before, tags))
            one = RoundReplay(
                function=function,
                mechanism=mechanism,
                load=load,
                number=number,
                weights=self._before[number],
                mean=self._means[number],
                receipts=NoiseReceipts(self._plan, self._keys.noise_key, tags),
                noise_key=self._keys.noise_key,
            )
            failed |= one.problems(index, _record(read, number).mechanism_state)
        self._replay = Replay(rounds=len(chosen), failed=sorted(failed))

    def found(self, released: np.ndarray) -> MechanismAudit:
        """Returns all evidence of a finished training, after `replay`.

        Args:
          released: released weights, float32 `[dim]`.
        """
        folded = released_weights(self._server, self._state)
        same = np.array_equal(folded[: released.size], released)
        return MechanismAudit(
            receipts=self._receipts.found,
            fold=Fold(rounds=self.rounds, same=same and self._named),
            replay=self._replay,
        )

    def evidence(self, released: np.ndarray) -> JsonObject:
        """Returns fields of the model card, see `found`."""
        return {"mechanism_audit": self.found(released).model_dump(mode="json")}

    def save(self, store: Store) -> None:
        """Writes the state, before the trainer writes its checkpoint."""
        head: _Head = {
            "inputs_sha": self._keys.inputs_sha,
            "rounds": self.rounds,
            "began": list(self._before),
            "named": self._named,
            "size": self._size,
            "receipts": self._receipts.figures,
        }
        kept = {
            _BEFORE: np.array(list(self._before.values()), np.float32),
            "means": np.array(list(self._means.values()), np.float32),
            "tags": np.frombuffer(b"".join(self._chain.tags), np.uint8),
        }
        store.write(_NAME, pack(head, kept | self._state.arrays))

    def restore(self, store: Store, read: Callable[[int], RoundRecord | None]) -> None:
        """Resumes from the last state saved by a trainer of the same attempt, or starts.

        Args:
          store: working state of the attempt.
          read: reads the record of a round. If rounds share noise, the last audited record has a
            digest of the tags of all rounds.

        Raises:
          ArtifactError: the state is damaged or belongs to other inputs.
        """
        try:
            data = store.read(_NAME)
        except FileNotFoundError:
            return
        try:
            packed, arrays = unpack(data, _BEFORE, "means", "tags", *STATE_ARRAYS)
            head = cast("_Head", packed)
            tags = arrays.pop("tags").reshape(head["rounds"], -1)
            before, means = arrays.pop(_BEFORE), arrays.pop("means")
            self._before = dict(zip(head["began"], before, strict=True))
            self._means = dict(zip(head["began"], means, strict=True))
        except (ValueError, KeyError) as error:
            raise ArtifactError(
                "The state of the audit cannot be read. Restore the working state of the run from "
                "a backup, or start a run with a new id."
            ) from error
        if head["inputs_sha"] != self._keys.inputs_sha:
            raise ArtifactError(
                "The state of the audit belongs to other inputs. Start a run with a new id."
            )
        self._chain, self._size = TagChain(row.tobytes() for row in tags), head["size"]
        self._state = ServerState(**arrays, rounds=head["rounds"])
        self._named = head["named"]
        if self.rounds:
            self._chain.check(_record(read, self.rounds - 1).tags_sha)
        before = self._shared(self.rounds)
        self._receipts = NoiseReceipts(self._plan, self._keys.noise_key, before)
        self._receipts.figures = head["receipts"]


def _record(read: Callable[[int], RoundRecord | None], number: int) -> RoundRecord:
    """Returns the record of a committed round."""
    record = read(number)
    assert record is not None, f"round {number} is committed"
    return record
