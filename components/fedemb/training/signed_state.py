"""The working state of an attempt, signed by the trainer and checked before a byte of it is parsed.

Checkpoint, round records and evidence lie in the private root between two starts of a trainer.
Whoever can write there could otherwise choose weights that the trainer then signs as its own, or
have a round drawn twice from different sums.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from fedemb.errors import ArtifactError, SignatureInvalid
from fedemb.foundation.canonical_json import canonical_json, sha256_hex, strict_json
from fedemb.keys.signatures import Signer
from fedemb.keys.trust import TrustStore
from fedemb.storage import Store
from fedemb.storage.fencing import FencedStore, FencingToken

_SCHEMA = "fedemb/working_state/1"
_LONGEST = 1000
"""Bytes of a signature's line."""


@dataclass(frozen=True)
class Origin:
    """Whose working state it is: that of another attempt does not fit."""

    run_id: str
    attempt: int
    inputs_sha: str


class SignedState(FencedStore):
    """Objects with a line before them: a signature over origin, name and content.

    Args:
      store: working state of the attempt.
      turn: nothing is changed once it is over.
      origin: of all that lies there.
      signer: of the trainer.
      trust: of the ledger.
      at: ledger record of the reservation; a key that was retired since counts.
    """

    def __init__(  # noqa: PLR0917 - whose turn, whose state, whose signature
        self,
        store: Store,
        turn: FencingToken,
        origin: Origin,
        signer: Signer,
        trust: TrustStore,
        at: int,
    ) -> None:
        super().__init__(store, turn)
        self._origin, self._signer, self._trust, self._at = origin, signer, trust, at

    def read(self, name: str) -> bytes:
        """As the store's.

        Raises:
          SignatureInvalid: the trainer did not sign it, under this name, in this attempt.
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
            at=self._at,
        )
        return data

    def write(self, name: str, data: bytes) -> None:
        """As the store's, in turn and signed."""
        super().write(name, self._with_signature(name, data))

    def create(self, name: str, data: bytes) -> None:
        """As the store's, in turn and signed."""
        super().create(name, self._with_signature(name, data))

    def _with_signature(self, name: str, data: bytes) -> bytes:
        return canonical_json(self._signer.sign(self._signed(name, data))) + b"\n" + data

    def _signed(self, name: str, data: bytes) -> dict[str, Any]:
        return {"schema": _SCHEMA, "name": name, "sha": sha256_hex(data), **asdict(self._origin)}
