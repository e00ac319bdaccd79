"""What a gate rule looks at, and what it says."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from fedemb.documents.evidence import Evidence
from fedemb.documents.plan_document import check_plan
from fedemb.documents.privacy_report import PrivacyReport
from fedemb.documents.verdict import NOT_APPROVED
from fedemb.foundation.document import Written
from fedemb.ledger import Ledger, Reservation
from fedemb.ledger.state import Attempt
from fedemb.privacy.mechanisms.mechanism import MechanismPlan

RERUN = "run account_privacy again on the artifacts of this run"
"""The remedy where the report alone is at fault."""


@dataclass(frozen=True)
class Reason:
    """Why a release is denied, and what to do."""

    code: str
    sentence: str
    remedy: str


def waiver(code: str) -> str:
    """How the policy owner lets a model through in spite of a rule, and where the run goes on."""
    return (
        f"sign `fedemb ledger waive {code} --model RUN --ledger LEDGER --keys KEYS --reason WHY`, "
        "and resume the run with --from account_privacy: its report states the waiver"
    )


@dataclass(frozen=True)
class Check:
    """The value that one rule checked, and its outcome."""

    rule: str
    outcome: Literal["passed", "denied", "waived"]
    value: str
    threshold: str
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """What the gate says; `allow` only without any reason."""

    allow: bool
    reasons: tuple[Reason, ...]
    simulation: bool = False
    waived: tuple[str, ...] = ()
    checks: tuple[Check, ...] = ()

    @property
    def waiting(self) -> bool:
        """Whether approvals are all that is missing."""
        return [reason.code for reason in self.reasons] == [NOT_APPROVED]


@dataclass(frozen=True)
class Case:
    """Everything a rule may look at; what is derived is checked again at each look."""

    evidence: Evidence
    signed: Written[PrivacyReport]
    ledger: Ledger
    now: datetime
    same_environment: bool = True
    """False when a bundle is verified later: library and code may be newer ones."""

    @property
    def report(self) -> PrivacyReport:
        """The privacy report."""
        return self.signed.body

    @property
    def plan(self) -> MechanismPlan:
        """The mechanism, as compared with the configuration."""
        evidence = self.evidence
        return check_plan(evidence.plan.body, evidence.config)

    @property
    def reservation(self) -> Reservation:
        """The reservation document."""
        return Reservation.of_document(self.evidence.reservation.body)

    @property
    def attempt(self) -> Attempt:
        """What the ledger says became of it."""
        return self.ledger.attempt(self.reservation)

    @property
    def head(self) -> int:
        """Last ledger record the report takes into account."""
        return self.report.cumulative.ledger_sequence
