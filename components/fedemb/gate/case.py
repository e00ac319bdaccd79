"""Input and output types of gate rules."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from fedemb.documents.evidence import Evidence
from fedemb.documents.plan_document import check_plan
from fedemb.documents.privacy_report import PrivacyReport
from fedemb.documents.verdict import NOT_APPROVED, RuleOutcome
from fedemb.foundation.document import Written
from fedemb.ledger import Ledger, Reservation
from fedemb.ledger.state import Attempt
from fedemb.privacy.mechanisms.mechanism import MechanismPlan

RERUN = "run account_privacy again on the artifacts of this run"
"""Remedy for faults of the report only."""


@dataclass(frozen=True)
class Reason:
    """Reason why a release is denied, with its remedy."""

    code: str
    sentence: str
    remedy: str


def waiver(code: str) -> str:
    """Returns instructions to waive a rule for one model and to resume the run."""
    return (
        f"sign `fedemb approve RUN --waive {code} --keys KEYS --reason WHY`, "
        "and resume the run with --from account_privacy: its report states the waiver"
    )


@dataclass(frozen=True)
class Verdict:
    """Verdict of the gate; `allow` only if no reason remains."""

    allow: bool
    reasons: tuple[Reason, ...]
    simulation: bool = False
    waived: tuple[str, ...] = ()
    checks: tuple[RuleOutcome, ...] = ()

    @property
    def waiting(self) -> bool:
        """Returns whether missing approvals are the only reason."""
        return [reason.code for reason in self.reasons] == [NOT_APPROVED]


@dataclass(frozen=True)
class Case:
    """Input of all rules. Derived values are checked again on each access."""

    evidence: Evidence
    signed: Written[PrivacyReport]
    ledger: Ledger
    now: datetime
    same_environment: bool = True
    """False when a bundle is verified later, possibly with newer library and code versions."""

    @property
    def report(self) -> PrivacyReport:
        """Returns the privacy report."""
        return self.signed.body

    @property
    def plan(self) -> MechanismPlan:
        """Returns the mechanism plan that is priced, after comparing it with the configuration."""
        evidence = self.evidence
        return check_plan(evidence.plan.body, evidence.config)

    @property
    def reservation(self) -> Reservation:
        """Returns the reservation in its document."""
        return Reservation.of(self.evidence.reservation)

    @property
    def attempt(self) -> Attempt:
        """Returns the state of the reservation's attempt in the ledger."""
        return self.ledger.attempt(self.reservation)

    @property
    def head(self) -> int:
        """Returns the number of the last ledger record that the report covers."""
        return self.report.cumulative.ledger_sequence
