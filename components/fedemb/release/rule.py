"""A rule of the gate, and what rules read.

A `Rule` is the only description of a rule: the checklist, the check before the charge and
docs/reference/gate.md follow from it. Comparisons are written so that NaN and missing values are
violations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from functools import wraps

from fedemb.config import RunConfig
from fedemb.documents.audit import AuditReport
from fedemb.documents.evidence import Evidence
from fedemb.documents.ledger_record import BindRecord, CommitRecord
from fedemb.documents.model import ModelCard
from fedemb.documents.plan import check_plan
from fedemb.documents.privacy_report import PrivacyReport
from fedemb.documents.utility import AnyUtility
from fedemb.documents.verdict import NOT_APPROVED, RuleOutcome
from fedemb.errors import LedgerError
from fedemb.foundation.canonical_json import Json
from fedemb.foundation.document import Written
from fedemb.ledger import Ledger, Reservation
from fedemb.ledger.state import Attempt
from fedemb.privacy.guarantee import PrivacyGuarantee
from fedemb.privacy.mechanism import MechanismPlan
from fedemb.privacy.prices import guarantee_of

RERUN = "run account_privacy again on the artifacts of this run"
"""Remedy for faults of the report only."""
RELATIVE_TOLERANCE = 1e-6
"""Relative tolerance of recomputed floats, for rounding differences between machines."""
LATER_TOLERANCE = 0.01
"""The same with a later version of the accounting library."""


@dataclass(frozen=True)
class Charge:
    """Values that are known before a charge."""

    config: RunConfig
    plan: MechanismPlan
    ledger: Ledger
    other_runs: int
    """Number of committed runs of the policy before this one."""

    @property
    def guarantee(self) -> PrivacyGuarantee:
        """Returns the recomputed guarantee of the plan."""
        return guarantee_of(self.plan, self.config.policy.delta)


@dataclass(frozen=True)
class Case:
    """Values that are known after the report. Derived values are checked again on each access."""

    evidence: Evidence
    signed: Written[PrivacyReport]
    ledger: Ledger
    now: datetime
    same_environment: bool = True
    """False when a bundle is verified later, possibly with newer library and code versions."""

    @property
    def charge(self) -> Charge:
        """Returns the values that were known before the charge."""
        return Charge(self.config, self.plan, self.ledger, self.report.tuning.other_runs_before)

    @property
    def config(self) -> RunConfig:
        """Returns the configuration of the run."""
        return self.evidence.config

    @property
    def report(self) -> PrivacyReport:
        """Returns the privacy report."""
        return self.signed.body

    @property
    def model(self) -> ModelCard:
        """Returns the model card that the trainer signed."""
        return self.evidence.model.body

    @property
    def audit(self) -> AuditReport:
        """Returns the audit report."""
        return self.evidence.audit.body

    @property
    def utility(self) -> AnyUtility:
        """Returns the utility report."""
        return self.evidence.utility.body

    @property
    def plan(self) -> MechanismPlan:
        """Returns the mechanism plan that is priced, after comparing it with the configuration."""
        return check_plan(self.evidence.plan.body, self.config)

    @property
    def reservation(self) -> Reservation:
        """Returns the reservation in its document."""
        return Reservation.of(self.evidence.reservation)

    @property
    def attempt(self) -> Attempt:
        """Returns the state of the reservation's attempt in the ledger."""
        return self.ledger.attempt(self.reservation)

    @property
    def bind(self) -> BindRecord:
        """Returns the ledger record that binds the inputs."""
        if self.attempt.bind is None:
            raise LedgerError(self.uncommitted)
        return self.attempt.bind.content(BindRecord)

    @property
    def commit(self) -> CommitRecord:
        """Returns the ledger record that ends the training."""
        if self.attempt.commit is None:
            raise LedgerError(self.uncommitted)
        return self.attempt.commit.content(CommitRecord)

    @property
    def uncommitted(self) -> str:
        """Returns the sentence about a run that is not committed."""
        status = self.attempt.status
        return f"run {self.reservation.run_id!r} is {status} in the ledger, not committed"

    @property
    def head(self) -> int:
        """Returns the number of the last ledger record that the report covers."""
        return self.report.cumulative.ledger_sequence

    @property
    def approvals(self) -> list[str]:
        """Returns who approved this model with exactly this report, by its deadline."""
        model, deadline = self.model.weights_sha, self.report.approve_by
        given = self.ledger.state.approvals_of(model, self.signed.sha, deadline)
        return [record.actor for record in given]


@dataclass(frozen=True)
class Rule:
    """One rule of the gate and of `fedemb verify`, as a decorator of its check.

    The name of the check is the code of the rule, and its docstring the condition that must hold.
    It yields a sentence for each violation.
    """

    remedy: str = RERUN
    waivable: bool = False
    """Whether the policy owner may waive the rule for one model. All others check arithmetic or
    integrity."""
    applies: Callable[[Case], bool] = lambda case: True
    """Whether the rule applies to a run."""
    value: Callable[[Case], str] = lambda case: ""
    """Value that the rule checks, for the checklist."""
    limit: Callable[[Case], str] = lambda case: ""
    """Limit of the value, for the checklist."""
    code: str = ""
    text: str = ""
    check: Callable[[Case], Iterable[str]] = lambda case: ("a rule without a check",)
    before: Callable[[Charge], Iterable[str]] | None = None
    """The same check before the charge, which refuses the run, or warns if it can be waived."""

    def __call__(self, check: Callable[[Case], Iterable[str]]) -> Rule:
        """Returns the rule with its check."""
        text = (check.__doc__ or "").partition(".\n")[0].rstrip(".")
        return replace(self, code=check.__name__, text=text, check=check)

    def before_charge(self, check: Callable[[Charge], Iterable[str]]) -> Rule:
        """Returns the rule with a check that also runs before the charge."""

        @wraps(check)
        def in_gate(case: Case) -> Iterable[str]:
            return check(case.charge)

        return replace(self(in_gate), before=check)

    @property
    def advice(self) -> str:
        """Returns the remedy, with the command of a waiver."""
        if not self.waivable:
            return self.remedy
        return (
            f"{self.remedy}; or let the policy owner sign `fedemb approve RUN --waive {self.code} "
            "--keys KEYS --reason WHY`, and resume the run with --from account_privacy: its report "
            "states the waiver"
        )


@dataclass(frozen=True)
class Reason:
    """Reason why a release is denied, with its remedy."""

    code: str
    sentence: str
    remedy: str
    waivable: bool = False
    """False for a rule that could not be evaluated."""


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


def differences(
    expected: Json, found: Json, path: str = "", *, tolerance: float = RELATIVE_TOLERANCE
) -> list[str]:
    """Returns the paths at which two JSON values differ; floats may differ by rounding.

    >>> differences({"a": 1.0, "b": [1]}, {"a": 1.0000000001, "b": [2], "c": 0})
    ['b.0', 'c']
    """
    if isinstance(expected, dict) and isinstance(found, dict):
        differing: list[str] = []
        for key in sorted({*expected, *found}):
            inner = f"{path}.{key}".lstrip(".")
            if key in expected and key in found:
                differing += differences(expected[key], found[key], inner, tolerance=tolerance)
            else:
                differing.append(inner)
        return differing
    if isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        return [
            item
            for index, pair in enumerate(zip(expected, found, strict=True))
            for item in differences(*pair, f"{path}.{index}".lstrip("."), tolerance=tolerance)
        ]
    if type(expected) is float and type(found) is float:
        close = math.isclose(expected, found, rel_tol=tolerance)
        return [] if close else [path]
    return [] if type(expected) is type(found) and expected == found else [path]
