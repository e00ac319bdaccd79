"""What the trainer found when it looked whether the priced mechanism is the one that ran.

Of sums and noise only what passed is told: exact figures of them are functions of private data.
What concerns canaries depends on keys and plan alone, and is told in full.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from fedemb.documents.fields import Code, Count
from fedemb.foundation.document import Part

if TYPE_CHECKING:
    from fedemb.privacy.mechanisms.mechanism import MechanismPlan

SIGMAS = 6.0
"""Standard deviations an honest run may be off: 2e-9 of a false alarm each."""
REPLAYED = 2
"""Rounds that are run again."""


class Receipts(Part):
    """Each round's output holds its noise, drawn again from key and tag, once and in full."""

    rounds: Count
    failed: Count
    """Rounds whose output does not hold its noise with slope 1."""
    together: bool
    """Whether the slope over all rounds is 1, as sharply as it can be measured."""


class Fold(Part):
    """The committed means through the server's step again give the released weights."""

    rounds: Count
    same: bool
    """To the bit."""


class Replay(Part):
    """Rounds, chosen by key, run again with one real user removed.

    Their outputs must be sum and noise to the last digit.
    """

    rounds: Count
    failed: list[Code]
    """What was not as it must be."""


class Witness(Part):
    """Canaries that went through a mechanism of their own, built from the plan as the real one."""

    rounds: Count
    coordinates: Count
    canaries: Count
    contributions: Count
    """Clipped vectors in all rounds."""
    noise_multiplier: float
    """Standard deviation of what came out beside the canaries' own directions / clip."""
    contribution: float
    """Mean length of a canary's vector in the noised sum / clip; each was longer than the clip."""
    sampling_probability: float | None
    """Share of canaries that took part, where each has a coin of its own."""

    def bounds(self, plan: MechanismPlan) -> dict[str, tuple[float, float, float]]:
        """Of each estimate: what was found, what the plan says, and how far it may be off."""
        free = max(1, self.rounds * self.coordinates - self.contributions)
        sigma = plan.noise_multiplier
        found = {
            "noise_multiplier": (
                self.noise_multiplier,
                sigma,
                SIGMAS * sigma / math.sqrt(2 * free),
            ),
            "contribution": (
                self.contribution,
                1.0,
                SIGMAS * sigma / math.sqrt(max(1, self.contributions)),
            ),
        }
        if self.sampling_probability is not None and plan.chance is not None:
            spread = math.sqrt(plan.chance * (1 - plan.chance) / (self.rounds * self.canaries))
            found["sampling_probability"] = (
                self.sampling_probability,
                plan.chance,
                SIGMAS * spread + 1e-12,
            )
        return found

    def off(self, plan: MechanismPlan) -> tuple[str, ...]:
        """Estimates that do not fit the plan; NaN fits nothing."""
        return tuple(
            name
            for name, (found, wanted, tolerance) in self.bounds(plan).items()
            if not abs(found - wanted) <= tolerance
        )


class LowerBounds(Part):
    """Bounds on epsilon from below at 95 %, from canaries put in and left out by key.

    For the reader; nothing is allowed or denied by them.
    """

    included: Count
    left_out: Count
    one_run: float
    """Steinke, Nasr, Jagielski (arXiv 2305.08846)."""
    f_dp: float
    """Mahloujifar, Melis, Chaudhuri (arXiv 2410.22235)."""


class Independence(Part):
    """Noise and coins of rounds, quantities, units, runs and keys, compared with each other."""

    rounds: Count
    """Rounds whose noise was compared."""
    failed: list[Code]
    """Checks that did not hold: see docs/privacy/audit.md#independence."""

    def problem(self, rounds: int) -> str | None:
        """Why a run of so many rounds has no independent noise and coins; None: it has."""
        if self.rounds == rounds and not self.failed:
            return None
        return (
            f"the noise of {self.rounds} of {rounds} rounds was compared; what is not independent: "
            f"{', '.join(self.failed) or 'unknown'}"
        )


class MechanismAudit(Part):
    """Evidence that what was priced is what ran."""

    receipts: Receipts
    fold: Fold
    replay: Replay
    witness: Witness | None
    """None: the mechanism's rounds share their noise."""
    lower_bounds: LowerBounds | None

    def failed(self, plan: MechanismPlan) -> dict[str, str]:
        """What did not hold for a run of this plan, by its code, in words."""
        receipts, fold, replay = self.receipts, self.fold, self.replay
        wrong: dict[str, str] = {}
        if receipts.rounds != plan.rounds or receipts.failed or not receipts.together:
            wrong["noise_receipt_failed"] = (
                f"of {plan.rounds} rounds {receipts.rounds} were looked at for their noise, "
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
        if self.witness is None and not plan.tracks_participation:
            wrong["witness_off"] = "no canary went through the mechanism"
        elif self.witness is not None and (off := self.witness.off(plan)):
            bounds = self.witness.bounds(plan)
            wrong["witness_off"] = "; ".join(
                f"canaries found {name} {bounds[name][0]:.4g}, the plan says {bounds[name][1]:.4g}"
                for name in off
            )
        return wrong
