"""Evidence, collected during training, that the priced mechanism is the one that runs.

The audit reads committed records, reads keys while they exist, and runs two rounds again. It does
not affect training: a run releases the same bits with or without it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from fedemb.config import ServerConfig
from fedemb.documents.mechanism_audit import Fold, Independence, MechanismAudit, Replay
from fedemb.engine.audit.attempt_keys import AttemptKeys
from fedemb.engine.audit.canaries import CanaryMechanism
from fedemb.engine.audit.independence import independence
from fedemb.engine.audit.receipts import NoiseReceipts
from fedemb.engine.audit.round_replay import RoundReplay
from fedemb.engine.packed_state import pack, unpack
from fedemb.engine.server import STATE_ARRAYS, ServerRule, ServerState, released_weights
from fedemb.engine.training_round import TrainingRound
from fedemb.errors import ArtifactError
from fedemb.foundation.canonical_json import sha256_hex
from fedemb.privacy.mechanisms.mechanism import MechanismPlan
from fedemb.privacy.queries import Mechanism
from fedemb.storage import Store

_NAME = "audit.npz"


class RoundAudit:
    """Receipts, fold, canaries, tags, and the initial weights of two rounds.

    Args:
      plan: what was priced.
      keys: of the attempt.
      server: rule that applies the noised mean.
      advance: its step on a noised mean.
      start: its state before round 0.
    """

    def __init__(
        self,
        plan: MechanismPlan,
        keys: AttemptKeys,
        server: ServerConfig,
        advance: ServerRule,
        start: ServerState,
    ):
        self._plan, self._keys, self._server, self._advance = plan, keys, server, advance
        self._state = start
        self._clip = plan.l2_norm_clip
        self._receipts = NoiseReceipts(plan, keys.noise_key)
        self._tags: list[bytes] = []
        self._size = 0
        self._canaries = None
        if not plan.tracks_participation:
            self._canaries = CanaryMechanism(plan, **vars(keys))
        self._named = True
        """Whether every public digest is that of the committed mean."""
        self._chosen = keys.chosen_rounds(plan.rounds)
        self._began: dict[int, np.ndarray] = {}
        self._means: dict[int, np.ndarray] = {}
        self._replay = Replay(rounds=0, failed=[])

    @property
    def rounds(self) -> int:
        """Returns the number of audited rounds."""
        return self._state.rounds

    def add(self, record: Any) -> float:
        """Adds the next committed round; returns the slope of its noise. Raw.

        Args:
          record: its `RoundRecord`, mean included.
        """
        if record.index in self._chosen:
            self._began[record.index] = self._state.weights
            self._means[record.index] = record.mean
        state = record.mechanism_state
        self._tags.append(bytes.fromhex(state["tag"]))
        self._size = record.mean.size
        slope = self._receipts.add(record.mean, self._clip, self._tags[-1])
        self._clip = float(state["l2_norm_clip"])
        self._named &= record.public.output_sha == sha256_hex(record.mean.tobytes())
        self._state = self._advance(self._server, self._state, record.mean)
        if self._canaries is not None:
            self._canaries.add(record.index)
        return slope

    def replay(
        self,
        function: TrainingRound,
        mechanism: Mechanism,
        index: Any,
        load: Callable[[Any], Any],
        read: Callable[[int], Any],
    ) -> None:
        """Runs the chosen rounds again, each with one of its users removed.

        The sum without the user, plus what their virtual client gave with them and less what it
        gives without, must be the sum whose keyed digest the round's record holds: then the same
        coins fell, and nothing of anybody else depended on that user. And what was committed must
        be that sum and its noise.

        Args:
          function: rounds of the training.
          mechanism: mechanism of the training; it is rewound.
          index: the users.
          load: reads the examples of a `sampling.VirtualClient`.
          read: the record of a round.
        """
        failed: set[str] = set()
        chosen = [number for number in self._chosen if number in self._began]
        for number in chosen:
            before = None if number == 0 else read(number - 1).mechanism_state
            tags = [bytes.fromhex(tag) for tag in (before or {}).get("tags", ())]
            one = RoundReplay(
                function,
                mechanism,
                load,
                number=number,
                weights=self._began[number],
                before=before,
                mean=self._means[number],
                receipts=NoiseReceipts(self._plan, self._keys.noise_key, tags),
                noise_key=self._keys.noise_key,
            )
            failed |= one.problems(index, read(number).mechanism_state)
        self._replay = Replay(rounds=len(chosen), failed=sorted(failed))

    def found(self, released: np.ndarray, delta: float) -> MechanismAudit:
        """Returns all evidence of a finished training, after `replay`.

        Args:
          released: weights that leave the training, float32 `[dim]`.
          delta: of the guarantee.
        """
        folded = released_weights(self._server, self._state)
        same = np.array_equal(folded[: released.size], released)
        canaries = self._canaries
        return MechanismAudit(
            receipts=self._receipts.found,
            fold=Fold(rounds=self.rounds, same=same and self._named),
            replay=self._replay,
            canaries=canaries.found if canaries else None,
            lower_bounds=canaries.lower_bounds(delta) if canaries else None,
        )

    def evidence(self, released: np.ndarray, delta: float) -> dict[str, Any]:
        """Fields of the model card, see `found` and `compared`."""
        return {
            "mechanism_audit": self.found(released, delta).model_dump(mode="json"),
            "independence": self.compared().model_dump(mode="json"),
        }

    def compared(self) -> Independence:
        """Noise and coins of a finished training, compared with each other."""
        found = independence(self._plan, self._keys, self._tags, self._size)
        if self._canaries is None or self._canaries.rounds_differ:
            return found
        return found.model_copy(update={"failed": [*found.failed, "canary_rounds"]})

    def save(self, store: Store) -> None:
        """Writes the state, next to the trainer's checkpoint and before it."""
        head = {
            "inputs_sha": self._keys.inputs_sha,
            "rounds": self.rounds,
            "began": list(self._began),
            "l2_norm_clip": self._clip,
            "named": self._named,
            "size": self._size,
            "receipts": self._receipts.to_json(),
            "canaries": self._canaries.to_json() if self._canaries else None,
        }
        kept = {
            "began": np.array(list(self._began.values()), np.float32),
            "means": np.array(list(self._means.values()), np.float32),
            "tags": np.frombuffer(b"".join(self._tags), np.uint8),
        }
        store.write(_NAME, pack(head, kept | self._state.arrays))

    def restore(self, store: Store, read: Callable[[int], Any]) -> None:
        """Resumes from the last state saved by a trainer of the same attempt, or starts.

        Args:
          store: working state of the attempt.
          read: the record of a round. The last audited record has the tags of all before, where
            rounds share their noise; a checkpoint may be older.

        Raises:
          ArtifactError: it is damaged or of other inputs.
        """
        try:
            data = store.read(_NAME)
        except FileNotFoundError:
            return
        try:
            head, arrays = unpack(data, "began", "means", "tags", *STATE_ARRAYS)
            tags = arrays.pop("tags").reshape(head["rounds"], -1)
            began, means = arrays.pop("began"), arrays.pop("means")
            self._began = dict(zip(head["began"], began, strict=True))
            self._means = dict(zip(head["began"], means, strict=True))
        except (ValueError, KeyError) as error:
            raise ArtifactError(
                "the audit's state cannot be read; restore the working state of the run from a "
                "backup, or start a run with a new id"
            ) from error
        if head["inputs_sha"] != self._keys.inputs_sha:
            raise ArtifactError("the audit's state is of other inputs; start a run with a new id")
        self._tags, self._size = [row.tobytes() for row in tags], head["size"]
        self._state = ServerState(**arrays, rounds=head["rounds"])
        self._clip, self._named = head["l2_norm_clip"], head["named"]
        last = read(self.rounds - 1).mechanism_state if self.rounds else {}
        before = [bytes.fromhex(tag) for tag in last.get("tags", ())]
        self._receipts = NoiseReceipts(self._plan, self._keys.noise_key, before)
        self._receipts.restore(head["receipts"])
        if self._canaries is not None:
            self._canaries.restore(head["canaries"])
