"""What a gate rule looks at, and what it says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from fedemb.documents.evidence import Evidence
from fedemb.ledger.ledger import Ledger, Reservation
from fedemb.ledger.state import Attempt
from fedemb.privacy.mechanisms.mechanism import MechanismPlan
from fedemb.privacy.planning.plan_document import check_plan

RERUN = "run account_privacy again on the artifacts of this run"
"""The remedy where the report alone is at fault."""


@dataclass(frozen=True)
class Reason:
    """Why a release is denied, and what to do."""

    code: str
    sentence: str
    remedy: str


@dataclass(frozen=True)
class Verdict:
    """What the gate says; `allow` only without any reason."""

    allow: bool
    reasons: tuple[Reason, ...]
    simulation: bool = False
    waived: tuple[str, ...] = ()


@dataclass(frozen=True)
class Case:
    """Everything a rule may look at; what is derived is checked anew at each look."""

    evidence: Evidence
    report: Mapping[str, Any]
    ledger: Ledger
    now: datetime
    same_environment: bool = True
    """False when a bundle is verified later: the accounting library may be a newer one."""

    @property
    def plan(self) -> MechanismPlan:
        """The mechanism, as compared with the configuration."""
        evidence = self.evidence
        return check_plan(dict(evidence.plan.body), evidence.config, evidence.config_sha)

    @property
    def reservation(self) -> Reservation:
        """The reservation document."""
        fields = ("schema", "signature")
        body = {k: v for k, v in self.evidence.reservation.body.items() if k not in fields}
        return Reservation.from_json(body)

    @property
    def attempt(self) -> Attempt:
        """What the ledger says became of it."""
        return self.ledger.attempt(self.reservation)

    @property
    def head(self) -> int:
        """Last ledger record the report takes into account."""
        sequence = self.report["cumulative"]["ledger_sequence"]
        if type(sequence) is not int:
            raise ValueError("ledger_sequence is no number")
        return sequence
