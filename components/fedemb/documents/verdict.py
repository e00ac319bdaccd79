"""The verdict of the gate: allowed or denied, with every rule, waiver and approval behind it."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import StringConstraints, model_validator

from fedemb.documents.fields import Code, Count, Name, Sha
from fedemb.foundation.document import Document, Part, Since

Line = Annotated[str, StringConstraints(max_length=512, pattern=r"^[^\x00-\x1f\x7f]*$")]
"""One line of text, shown as it is."""


NOT_APPROVED = "not_approved"
"""Code of the one reason that people remove by approving: waiting, not a refusal."""


class RuleOutcome(Part):
    """What one rule of the gate found."""

    rule: Code
    outcome: Literal["passed", "denied", "waived"]
    value: Line
    """The value that the rule checked; empty: it could not be evaluated."""
    threshold: Line
    """What the rule asks for."""
    reasons: list[Code]
    """Codes of the reasons it gave, waived ones included."""


class AppliedWaiver(Part):
    """A waiver in the ledger without which the gate would have denied."""

    code: Code
    actor: Name
    """Who signed, as they named themselves; `unnamed`: only their key is known."""
    reason: Line
    """The first line of the reason in the ledger record, cut to length."""
    sequence: Count
    """Number of the ledger record."""


class GivenApproval(Part):
    """An approval in the ledger of this model with this report."""

    actor: Name
    sequence: Count


class VerdictDocument(Document):
    """Written by gate_release. The sentences of the reasons are in its log and its page."""

    kind: ClassVar[str] = "verdict"
    newest: ClassVar[int] = 2
    role: ClassVar[str | None] = "gate"

    allow: bool
    simulation: bool
    reasons: list[Code]
    waived: list[Code]
    audit_level: Name
    config_sha: Sha
    model_sha: Sha | None
    """None in a denial of what could not be read."""
    report_sha: Sha | None
    name: Annotated[Name | None, Since(2, before=None)]
    """Under which the model may be released; None in a denial of what could not be read."""
    version: Annotated[Name | None, Since(2, before=None)]
    checks: Annotated[list[RuleOutcome], Since(2, before=[])]
    """One for each rule, in the order in which they are evaluated; none in a simulation."""
    waivers: Annotated[list[AppliedWaiver], Since(2, before=[])]
    approvals: Annotated[list[GivenApproval], Since(2, before=[])]
    approvals_needed: Annotated[Count | None, Since(2, before=None)]
    """Approvals that the policy requires; None: the ledger could not be read."""
    ledger_sequence: Annotated[Count | None, Since(2, before=None)]
    """Last ledger record the gate knew; None: the ledger could not be read."""

    @model_validator(mode="after")
    def _follows(self) -> VerdictDocument:
        whole = self.model_sha is not None and self.report_sha is not None
        if self.allow and (self.simulation or self.reasons or not whole):
            raise ValueError("it allows what it has reasons to deny")
        denying = any(check.outcome == "denied" for check in self.checks)
        if self.allow and denying:
            raise ValueError("it allows what one of its rules denies")
        return self

    @property
    def waiting(self) -> bool:
        """Whether approvals are all that is missing."""
        return not self.allow and self.reasons == [NOT_APPROVED]
