"""The audit report: what an attack on the model found, and how the auditor did in its own test.

Whether a test was passed, or something was found, is computed from figures, never written down.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from fedemb.config.policy import Unit
from fedemb.documents.fields import Count, Interval, Name, PlantedBugs, Rate, Sha
from fedemb.documents.mechanism_audit import Independence, MechanismAudit
from fedemb.foundation.document import Document, Part, Since

MOST_ALARMS = 7
"""95 % intervals: 40 nulls give 2 alarms on average, more than 7 with chance below 0.2 %."""
Attack = Literal["verification_score", "confidence_score"]
"""By what users are told apart: of embeddings, and of a classifier."""
Finding = Literal["leak", "reversed", "nothing"]


def finding(auroc: Interval) -> Finding:
    """`leak`, `reversed` (members score lower, significantly) or `nothing`."""
    if auroc.low > 0.5:
        return "leak"
    return "reversed" if auroc.high < 0.5 else "nothing"


def attack_on(task: Literal["embedding", "classification"]) -> Attack:
    """The attack that suits what was trained."""
    return "confidence_score" if task == "classification" else "verification_score"


class NoLeak(Part):
    """Made-up users without a leak: the mean AUROC of all trials, and how many raised an alarm."""

    auroc: float
    alarms: Count
    trials: Count


class SelfTest(Part):
    """What the auditor said of made-up users."""

    no_leak: NoLeak
    planted_leak: Interval
    """AUROC where a leak was planted."""
    reversed_sign: Interval
    """The same with the score reversed."""
    missing_score_refused: bool
    missing_side_refused: bool

    @property
    def failed(self) -> tuple[str, ...]:
        """The cases that did not come out as they must."""
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
    """How well a score told members from others."""

    auroc: Interval
    tpr_at_fpr: dict[Rate, Interval]
    """Share of members above the threshold, by false positive rate."""


class AttackFigures(Part):
    """The attack by the score itself, and by its change since before private training."""

    plain: Attacked
    calibrated: Attacked


class AuditReport(Document):
    """Written by audit_privacy."""

    kind: ClassVar[str] = "audit_report"
    newest: ClassVar[int] = 3
    role: ClassVar[str | None] = "audit"

    run_id: Name
    config_sha: Sha
    model_sha: Sha
    code_sha: Sha
    level: Name
    attack: Attack
    self_test: SelfTest
    planted_bug_suite: PlantedBugs
    figures: Literal["open", "private"]
    """Private: they are exact functions of training users and stay in the private root."""
    lower_bound: float | None
    """On epsilon; None: this level measures none."""
    split_by_value: bool
    """Held-out users are of another population."""
    unit: Annotated[Unit, Since(2, before="user")]
    """Who is told from others."""
    users_at_most: Count
    bootstrap_samples: Count
    measured: AttackFigures | None
    """None: private, too few users on one of the sides, or a model whose outputs are not finite."""
    mechanism: Annotated[MechanismAudit | None, Since(2, before=None)]
    """What the trainer found of its mechanism; None at level `monitoring`."""
    independence: Annotated[Independence | None, Since(3, before=None)]
    """What the trainer found when it compared noise and coins of the rounds."""
