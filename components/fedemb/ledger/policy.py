"""What the policy owner writes into the ledger, and the one way anything is written.

Every act may be repeated, and is decided on the latest state. The same content gives the same
record again, another content is refused.
"""

from __future__ import annotations

import getpass
import os
from collections.abc import Callable, Sequence
from typing import Any

from fedemb.errors import Refused
from fedemb.keys import KeyStore
from fedemb.keys.signatures import Signer
from fedemb.keys.trust import TrustedKey
from fedemb.ledger.chain import Chain
from fedemb.ledger.records import Record
from fedemb.ledger.reservation import Reservation
from fedemb.ledger.terms import PolicyTerms
from fedemb.ledger.view import LedgerView

Decide = Callable[[], dict[str, Any] | Record]
"""Looks at the latest state; returns what to write or the record that says so already."""


class PolicyLedger(LedgerView):
    """The ledger of one policy, as its owner writes it."""

    def __init__(self, chain: Chain, signer: Signer | None = None):
        """Takes the chain; without a signer the ledger can only be read."""
        super().__init__(chain)
        self._signer = signer

    def unlock(self, keys: KeyStore) -> None:
        """Takes the key of the role `ledger` from the store, so that it can be written.

        Raises:
          LedgerError: the store has another key than the ledger trusts, or none.
        """
        self._signer = Signer.current(keys, "ledger", self.chain.trust)

    def create_policy(self, terms: PolicyTerms, signer: Signer) -> Record:
        """Writes record 0; the same terms again change nothing.

        Args:
          terms: fixed for the policy's life.
          signer: the policy owner's key, role `policy`.

        Raises:
          Refused: the policy exists with other terms, or a term is out of bounds.
        """

        def decide() -> dict[str, Any] | Record:
            if not self.chain.records:
                PolicyTerms.from_json(terms.to_json())  # what no reader would take is not written
                return {"terms": terms.to_json()}
            self.check_terms(terms)
            return self.chain.records[0]

        return self._append("policy", decide, signer=signer)

    def check_terms(self, terms: PolicyTerms) -> None:
        """Refuses terms that are not the policy's.

        Raises:
          Refused: and which differ.
        """
        changed = self.terms.differences(terms)
        if changed:
            raise Refused(
                f"policy {self.policy_id!r} does not fit: {'; '.join(changed)}. Set it back, or "
                "start another policy_id and add up the epsilons of both"
            )

    def waive(self, *, code: str, model_sha: str, reason: str, signer: Signer) -> Record:
        """Writes the policy owner's waiver of one gate rule for one model."""
        body = {"code": code, "model_sha": model_sha, "reason": reason}
        return self._append("waiver", lambda: body, signer=signer)

    def rotate(self, keys: Sequence[TrustedKey], reason: str, signer: Signer) -> Record:
        """Names the next generation of signing keys and retires those before.

        What a retired key signed before stays trusted, what it signs from now on does not.

        Args:
          keys: public halves, one of a role at most.
          reason: why; stays in the ledger for ever.
          signer: the policy owner's key as trusted so far, role `policy`.

        Raises:
          LedgerError: a key is not of a later generation than the one it replaces.
        """
        named = [vars(key).copy() for key in keys]

        def decide() -> dict[str, Any] | Record:
            for record in self.state.rotations:
                if record.body["keys"] == named:
                    return record
            self.chain.trust.rotated(named, self.head.sequence + 1)  # none would take it otherwise
            return {"keys": named, "reason": reason}

        return self._append("keys", decide, signer=signer)

    def _append(
        self,
        kind: str,
        decide: Decide,
        *,
        reservation: Reservation | None = None,
        run_id: str = "",
        attempt: Callable[[], int] = lambda: 0,
        signer: Signer | None = None,
    ) -> Record:
        signer = signer or self._signer
        if signer is None:
            raise Refused(f"this ledger was opened for reading; writing a {kind} needs its key")
        if reservation is not None:
            run_id, number = reservation.run_id, reservation.attempt
            attempt = lambda: number  # noqa: E731
        return self.chain.append(
            decide, kind=kind, run_id=run_id, attempt=attempt, actor=_actor(), signer=signer
        )


def _actor() -> str:
    """Who writes: FEDEMB_ACTOR, else the account."""
    try:
        return os.environ.get("FEDEMB_ACTOR") or getpass.getuser()
    except (KeyError, OSError):
        return f"uid {os.getuid()}"
