"""Results of the trainer's check that the priced mechanism is the one that ran.

For sums and noise, only pass or fail is reported, because exact figures are functions of private
data. Canary figures depend only on keys and plan, and are reported in full.
"""

from __future__ import annotations

import math
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


class CanaryFigures(Part):
    """Canaries in a separate mechanism that is built from the plan like the real one."""

    rounds: Count
    coordinates: Count
    canaries: Count
    contributions: Count
    """Number of clipped vectors in all rounds."""
    noise_multiplier: float
    """Standard deviation of the output outside the canaries' directions, divided by the clip."""
    contribution: float
    """Mean length of a canary's vector in the noised sum, divided by the clip. Each vector was
    longer than the clip before clipping."""
    sampling_probability: float | None
    """Share of canaries that took part, if each has a separate coin."""

    def bounds(self, plan: MechanismPlan) -> dict[str, tuple[float, float, float]]:
        """Returns for each estimate: measured value, value of the plan, and tolerance."""
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
        """Returns the estimates that differ from the plan; NaN always differs."""
        return tuple(
            name
            for name, (found, wanted, tolerance) in self.bounds(plan).items()
            if not abs(found - wanted) <= tolerance
        )


class LowerBounds(Part):
    """Lower bounds on epsilon at 95 %, from canaries included or excluded by key.

    For information only; the gate does not use them.
    """

    included: Count
    left_out: Count
    one_run: float
    """Steinke, Nasr, Jagielski (arXiv 2305.08846)."""
    f_dp: float
    """Mahloujifar, Melis, Chaudhuri (arXiv 2410.22235)."""


class MechanismAudit(Part):
    """Evidence that the priced mechanism is the one that ran."""

    receipts: Receipts
    fold: Fold
    replay: Replay
    canaries: CanaryFigures | None
    """Canary results; None: the mechanism's rounds share their noise."""
    lower_bounds: LowerBounds | None

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
        if self.canaries is None and not plan.tracks_participation:
            wrong["canaries_off"] = "no canary went through the mechanism"
        elif self.canaries is not None and (off := self.canaries.off(plan)):
            bounds = self.canaries.bounds(plan)
            wrong["canaries_off"] = "; ".join(
                f"canaries found {name} {bounds[name][0]:.4g}, the plan says {bounds[name][1]:.4g}"
                for name in off
            )
        return wrong
