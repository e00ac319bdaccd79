"""Results of the trainer's check that the priced mechanism is the one that ran.

Only pass or fail is reported, because exact figures are functions of private data.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedemb.documents.fields import Code, Count
from fedemb.foundation.document import Part

if TYPE_CHECKING:
    from fedemb.privacy.mechanisms.mechanism import MechanismPlan

SIGMAS = 6.0
"""Tolerance in standard deviations: a false alarm has probability 2e-9 per estimate."""
REPLAYED = 2
"""Number of rounds that are run again."""


class Receipts(Part):
    """Check that each round's output contains its full noise once, redrawn from key and tag."""

    rounds: Count
    failed: Count
    """Number of rounds whose output does not contain its noise with slope 1."""
    together: bool
    """Whether the slope over all rounds is 1 within measurement precision."""


class Fold(Part):
    """Check that the server step on the committed means gives the released weights again."""

    rounds: Count
    same: bool
    """Whether both are equal, bit for bit."""


class Replay(Part):
    """Rounds, chosen by key, that were run again with one real user removed.

    Their outputs must equal sum plus noise to the last digit.
    """

    rounds: Count
    failed: list[Code]
    """Codes of failed checks."""


class MechanismAudit(Part):
    """Evidence that the priced mechanism is the one that ran."""

    receipts: Receipts
    fold: Fold
    replay: Replay

    def failed(self, plan: MechanismPlan) -> dict[str, str]:
        """Returns code -> description of each check that failed for a run of this plan."""
        receipts, fold, replay = self.receipts, self.fold, self.replay
        wrong: dict[str, str] = {}
        if receipts.rounds != plan.rounds or receipts.failed or not receipts.together:
            wrong["noise_receipt_failed"] = (
                f"the noise of {receipts.rounds} of {plan.rounds} rounds was checked, "
                f"{receipts.failed} of them do not hold it in full, and all together "
                f"{'do' if receipts.together else 'do not'}"
            )
        if fold.rounds != plan.rounds or not fold.same:
            wrong["fold_differs"] = (
                f"the committed means of {fold.rounds} of {plan.rounds} rounds do not give the "
                "released weights"
            )
        if replay.rounds < min(REPLAYED, plan.rounds) or replay.failed:
            wrong["replay_differs"] = (
                f"{replay.rounds} rounds were run again without one of those in them; what is "
                f"not as it must be: {', '.join(replay.failed) or 'too few'}"
            )
        return wrong
