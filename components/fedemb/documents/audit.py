"""Results of the trainer's check that the priced mechanism is the one that ran.

Only pass or fail is reported, because exact figures are functions of private data.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar, Literal

from fedemb.config.policy import Unit
from fedemb.documents.fields import Code, Count, Interval, Name, Rate, Sha
from fedemb.foundation.document import Document, Part

if TYPE_CHECKING:
    from fedemb.privacy.mechanism import MechanismPlan

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
    normals: Count
    """Number of normals of the noise: rounds x trained weights."""
    scaled: bool
    """Whether their variance is the planned one, in all and in each block of weights."""

    @property
    def least_error(self) -> float:
        """Relative error of the scale of all noise that is found with probability 0.999."""
        return (SIGMAS + 3.1) / math.sqrt(2 * max(1, self.normals))


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
        whole = receipts.together and receipts.scaled
        if receipts.rounds != plan.rounds or receipts.failed or not whole:
            wrong["noise_receipt_failed"] = (
                f"the noise of {receipts.rounds} of {plan.rounds} rounds was checked, "
                f"{receipts.failed} of them do not hold it in full, and all together "
                f"{'do' if receipts.together else 'do not'}; its variance is "
                f"{'' if receipts.scaled else 'not '}the planned one"
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


MOST_ALARMS = 7
"""Maximum false alarms in 40 nulls with 95 % intervals: 2 on average, above 7 in under 0.2 %."""
Attack = Literal["verification_score", "confidence_score"]
"""Score of the attack: verification score for embeddings, confidence score for a classifier."""
Finding = Literal["leak", "reversed", "nothing"]


def finding(auroc: Interval) -> Finding:
    """Returns `leak`, `reversed` (members score significantly lower) or `nothing`."""
    if auroc.low > 0.5:
        return "leak"
    return "reversed" if auroc.high < 0.5 else "nothing"


def attack_on(task: Literal["embedding", "classification"]) -> Attack:
    """Returns the attack for a task."""
    return "confidence_score" if task == "classification" else "verification_score"


class NoLeak(Part):
    """Synthetic users without a leak: the mean AUROC of all trials, and the number of alarms."""

    auroc: float
    alarms: Count
    trials: Count


class SelfTest(Part):
    """Results of the auditor on synthetic users."""

    no_leak: NoLeak
    planted_leak: Interval
    """AUROC with a planted leak."""
    reversed_sign: Interval
    """The same with the score reversed."""
    missing_score_refused: bool
    missing_side_refused: bool

    @property
    def failed(self) -> tuple[str, ...]:
        """Returns the cases with an unexpected result."""
        nulls = self.no_leak
        passed = {
            "no_leak": abs(nulls.auroc - 0.5) < 0.02
            and nulls.trials >= 40
            and nulls.alarms <= MOST_ALARMS,
            "planted_leak": finding(self.planted_leak) == "leak" and self.planted_leak.value > 0.6,
            "reversed_sign": finding(self.reversed_sign) == "reversed"
            and self.reversed_sign.value < 0.4,
            "missing_score": self.missing_score_refused,
            "missing_side": self.missing_side_refused,
        }
        return tuple(name for name, well in passed.items() if not well)


class Attacked(Part):
    """Ability of a score to distinguish members from non-members."""

    auroc: Interval
    tpr_at_fpr: dict[Rate, Interval]
    """Share of members above the threshold, by false positive rate."""


class AttackFigures(Part):
    """Attack by the score itself, and by its change during private training."""

    plain: Attacked
    calibrated: Attacked


class AuditReport(Document):
    """Written by audit_privacy."""

    kind: ClassVar[str] = "audit_report"
    role: ClassVar[str | None] = "audit"

    run_id: Name
    config_sha: Sha
    model_sha: Sha
    code_sha: Sha
    attack: Attack
    self_test: SelfTest
    figures: Literal["open", "private"]
    """`open`: figures are in the report; `private`: they are exact functions of training users and
    stay in the private root."""
    split_by_value: bool
    """Whether held-out users are from another population."""
    unit: Unit
    """Unit whose membership is attacked."""
    users_at_most: Count
    bootstrap_samples: Count
    measured: AttackFigures | None
    """Figures; None: private, too few users on one side, or model outputs that are not finite."""
    mechanism: MechanismAudit | None
    """Audit of the mechanism by the trainer; None: trained without noise."""
