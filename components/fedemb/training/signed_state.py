"""The working state of an attempt, signed by the trainer and verified before it is parsed.

Checkpoint, round records and evidence stay in the private root between two starts of a trainer.
Without signatures, anyone with write access could choose weights that the trainer then signs, or
have a round drawn twice from different sums.
"""

from __future__ import annotations

from fedemb.errors import ArtifactError, SignatureInvalid
from fedemb.foundation.canonical_json import JsonObject, canonical_json, sha256_hex, strict_json
from fedemb.keys.trust import Signer, TrustStore
from fedemb.storage import Store
from fedemb.storage.fencing import FencedStore, FencingToken
from fedemb.training.attempt_inputs import AttemptInputs

_SCHEMA = "fedemb/working_state/1"
_LONGEST = 1000
"""Maximum bytes of a signature line."""


class SignedState(FencedStore):
    """Objects with a first line that signs attempt, inputs, name and content.

    Args:
      store: working state of the attempt.
      token: fencing token; after it is superseded, no object is changed.
      inputs: inputs of the attempt; state of others is rejected. Keys retired since its
          reservation are accepted.
      signer: signer of the trainer.
      trust: trusted keys of the ledger.
    """

    def __init__(
        self,
        store: Store,
        token: FencingToken,
        inputs: AttemptInputs,
        signer: Signer,
        trust: TrustStore,
    ) -> None:
        super().__init__(store, token)
        self._inputs, self._signer, self._trust = inputs, signer, trust

    def read(self, name: str) -> bytes:
        """Reads and verifies an object.

        Raises:
          SignatureInvalid: the trainer did not sign it under this name in this attempt.
        """
        line, _, data = super().read(name).partition(b"\n")
        try:
            signature = strict_json(line[:_LONGEST], f"the signature of {name}")
        except ArtifactError as error:
            raise SignatureInvalid(
                f"{name} of the working state is not signed by the trainer; restore the working "
                "state from a backup, or start a run with a new id"
            ) from error
        self._trust.verify(
            self._signed(name, data),
            signature,
            self._signer.role,
            f"{name} of the working state",
            at=self._inputs.reservation.sequence,
        )
        return data

    def write(self, name: str, data: bytes) -> None:
        """Signs and writes an object if the fencing token is current."""
        super().write(name, self._with_signature(name, data))

    def create(self, name: str, data: bytes) -> None:
        """Signs and creates an object if the fencing token is current."""
        super().create(name, self._with_signature(name, data))

    def _with_signature(self, name: str, data: bytes) -> bytes:
        return canonical_json(self._signer.sign(self._signed(name, data))) + b"\n" + data

    def _signed(self, name: str, data: bytes) -> JsonObject:
        return {
            "schema": _SCHEMA,
            "name": name,
            "sha": sha256_hex(data),
            "run_id": self._inputs.run_id,
            "attempt": self._inputs.number,
            "inputs_sha": self._inputs.inputs_sha,
        }
