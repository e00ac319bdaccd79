"""An attempt that the ledger has bound to its inputs and to one working state.

The working state is `<private_root>/<run_id>/train/attempt-<n>/`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fedemb.documents.model import ModelCard
from fedemb.engine.audit.attempt_keys import AttemptKeys
from fedemb.foundation.canonical_json import sha256_hex
from fedemb.foundation.document import Written, parse
from fedemb.foundation.files import write_bytes
from fedemb.keys import KeyStore, commitment_key, reservation_key_name
from fedemb.keys.signatures import Signer, write_signed
from fedemb.ledger import Ledger
from fedemb.runtime.step_context import StepContext
from fedemb.storage import open_store
from fedemb.storage.fencing import FencingToken
from fedemb.training.attempt_inputs import AttemptInputs
from fedemb.training.claim import claim
from fedemb.training.round_log import RoundLog
from fedemb.training.signed_state import Origin, SignedState

_INJECTED = "key_injected"
"""Marker in the working state: a round may have been drawn from an injected key."""
_CARD = "model.json"
"""Name of the model card as first signed."""


@dataclass(frozen=True, kw_only=True)
class BoundAttempt:
    """A bound attempt; created by `bind`."""

    inputs: AttemptInputs
    ledger: Ledger
    keys: KeyStore
    token: FencingToken
    signer: Signer
    store: SignedState
    """Working state; rejects writes after the step was started again."""
    log: RoundLog
    """Round records in the working state."""

    @classmethod
    def bind(cls, context: StepContext, step: str, inputs: AttemptInputs) -> BoundAttempt:
        """Binds an attempt in the ledger and opens its working state.

        Args:
          context: context of the training step.
          step: name of the training step.
          inputs: verified inputs of the attempt.

        Raises:
          Refused: the attempt trains with another private root.
          PlanMismatch: the attempt is bound to other inputs.
        """
        reservation, keys, ledger = inputs.reservation, context.keys, context.writable_ledger
        state = open_store(context.private("train", f"attempt-{reservation.attempt}"))
        ledger.bind(
            reservation,
            inputs_sha=inputs.inputs_sha,
            commitments=inputs.users.commitments.model_dump(),
            private_root=claim(state, commitment_key(keys, inputs.config.policy.policy_id)),
            keys=keys,
        )
        token, trust = FencingToken(state.uri, step), ledger.chain.trust
        signer = Signer.current(keys, "trainer", trust)
        origin = Origin(inputs.run_id, reservation.attempt, inputs.inputs_sha)
        store = SignedState(state, token, origin, signer, trust, reservation.sequence)
        return cls(
            inputs=inputs,
            ledger=ledger,
            keys=keys,
            token=token,
            signer=signer,
            store=store,
            log=RoundLog(store, inputs.inputs_sha),
        )

    def attempt_keys(self, injected: bytes | None) -> AttemptKeys:
        """Returns the keys of coins and noise.

        Args:
          injected: root key passed by the caller; it is recorded before the first round. None
              fetches the secret key of the reservation.
        """
        run_id, attempt, root_key = self.inputs.run_id, self.inputs.reservation.attempt, injected
        if root_key is None:
            root_key = self.keys.fetch(reservation_key_name(run_id, attempt))
        else:
            self.store.write(_INJECTED, b"")  # never deleted
        return AttemptKeys(root_key, run_id, attempt, self.inputs.inputs_sha)

    @property
    def key_injected(self) -> bool:
        """Whether a round may have been drawn from an injected key."""
        return self.store.exists(_INJECTED)

    def write_card(self, path: Path, card: ModelCard) -> Written[ModelCard]:
        """Writes the card exactly as a trainer of the attempt first signed it.

        The commit names these bytes, and the trainer's key may have been rotated since.
        """
        if self.store.exists(_CARD):
            kept = parse(self.store.read(_CARD), ModelCard, _CARD)
            if kept.body == card:
                write_bytes(path, kept.data)
                return kept
        signed = write_signed(path, card, self.signer)
        self.store.write(_CARD, signed.data)
        return signed

    def commit(self, rounds: int, round_log: bytes, card_sha: str) -> None:
        """Commits the attempt; no computation is allowed under its reservation afterwards."""
        self.ledger.commit(
            self.inputs.reservation,
            rounds_started=rounds,
            round_log_sha=sha256_hex(round_log),
            card_sha=card_sha,
            signer=self.signer,
            keys=self.keys,
        )
