"""The reading half of the ledger: what stands there, what it adds up to, whether it holds."""

from __future__ import annotations

from collections.abc import Iterable

from fedemb.errors import BudgetExceeded, LedgerError
from fedemb.ledger.budget import Spent
from fedemb.ledger.chain import Anchor, Chain
from fedemb.ledger.records import Record
from fedemb.ledger.reservation import Reservation
from fedemb.ledger.state import Attempt, LedgerState
from fedemb.ledger.terms import PolicyTerms


class LedgerView:
    """The ledger of one policy, read and verified."""

    def __init__(self, chain: Chain):
        self.chain = chain
        self._state = LedgerState()
        self._signatures = True

    @property
    def policy_id(self) -> str:
        """Whose ledger it is."""
        return self.chain.policy_id

    @property
    def head(self) -> Record:
        """The last record as of the last refresh."""
        return self.chain.head

    @property
    def state(self) -> LedgerState:
        """All records so far, replayed."""
        fresh = self.chain.records[self._state.replayed :]
        self._state.replay(fresh, self.chain.trust if self._signatures else None)
        return self._state

    @property
    def terms(self) -> PolicyTerms:
        """What the policy fixes.

        Raises:
          LedgerError: the ledger is empty.
        """
        terms = self.state.terms
        if terms is None:
            raise LedgerError(
                f"there is no ledger of policy {self.policy_id!r} in {self.chain.store.uri}; make "
                "one with `fedemb ledger init`, or name the right store"
            )
        return terms

    def refresh(self, *, signatures: bool = True) -> None:
        """Reads and verifies what was added since.

        Args:
          signatures: False leaves all but the last signature to the hash chain; for display only.
        """
        self._signatures = signatures
        self.chain.refresh(signatures=signatures)

    def spent(self, block: str) -> Spent:
        """The cumulative price of a block."""
        return self.state.spent(block)

    def verify(self, anchors: Iterable[Anchor] = ()) -> None:
        """Checks everything: bytes, chain, signatures, rules, caps, and records named elsewhere.

        Raises:
          LedgerError: and what is wrong, naming the record.
          SignatureInvalid: a record was changed or is signed by an unknown key.
          BudgetExceeded: a block is over its cap.
        """
        self.refresh()
        self.chain.check_anchors(anchors)
        cap = self.terms.epsilon_cap
        for block in self.state.by_block:
            epsilon = self.spent(block).epsilon
            if not epsilon <= cap:
                raise BudgetExceeded(
                    f"block {block} has epsilon={epsilon:.4g} above its cap {cap:g}: the ledger "
                    "holds more than could have been reserved"
                )

    def attempt(self, reservation: Reservation) -> Attempt:
        """What became of a reservation, which must stand in the ledger as it says.

        Raises:
          LedgerError: it does not.
        """
        self.chain.check_anchors([reservation.anchor])
        attempt = self.state.attempts.get((reservation.run_id, reservation.attempt))
        if attempt is None or Reservation.of(attempt.reserve) != reservation:
            raise LedgerError(
                f"the reservation of run {reservation.run_id!r} says something else than record "
                f"{reservation.sequence} of the ledger; run reserve_budget again"
            )
        return attempt
