"""Verdict of the gate, and manifest of a release."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, NamedTuple

from pydantic import StringConstraints, model_validator

from fedemb.documents.fields import Code, Count, Name, Sha
from fedemb.foundation.document import Document, Part

Line = Annotated[str, StringConstraints(max_length=512, pattern=r"^[^\x00-\x1f\x7f]*$")]
"""One line of text, shown unchanged."""


NOT_APPROVED = "not_approved"
"""Code of the reason that approvals remove: the run is waiting, not refused."""


NO_APPROVAL_IN_TIME = "no_approval_by_deadline"
"""Code of the reason after the deadline of the approvals, which nothing removes."""


class RuleOutcome(Part):
    """Result of one gate rule."""

    rule: Code
    text: Line
    """Condition of the rule."""
    outcome: Literal["passed", "failed", "waived", "not_applicable"]
    value: Line
    """Value that the rule checked; empty: it has none, or the value could not be computed."""
    limit: Line
    """Limit of the value."""

    @property
    def waiting(self) -> bool:
        """Returns whether approvals are missing."""
        return self.rule == NOT_APPROVED and self.outcome == "failed"


class AppliedWaiver(Part):
    """Waiver in the ledger without which the gate would have denied."""

    code: Code
    actor: Name
    """Name given by the signer; `unnamed`: only the key is known."""
    reason: Line
    """First line of the reason in the ledger record, truncated."""
    sequence: Count
    """Number of the ledger record."""


class GivenApproval(Part):
    """Approval in the ledger of this model with this report."""

    actor: Name
    sequence: Count


class VerdictDocument(Document):
    """Written by gate_release, whose log and page contain the text of the reasons."""

    kind: ClassVar[str] = "verdict"
    role: ClassVar[str | None] = "gate"

    allow: bool
    simulation: bool
    reasons: list[Code]
    waived: list[Code]
    config_sha: Sha
    model_sha: Sha | None
    """SHA-256 of the model; None if a denied model could not be read."""
    report_sha: Sha | None
    name: Name | None
    """Name under which the model may be released; None if denied because it could not be read."""
    version: Name | None
    checks: list[RuleOutcome]
    """Outcome of each rule, in the order of evaluation; empty in a simulation."""
    waivers: list[AppliedWaiver]
    approvals: list[GivenApproval]
    approvals_needed: Count | None
    """Number of approvals that the policy requires; None: the ledger could not be read."""
    ledger_sequence: Count | None
    """Last ledger record that the gate read; None: the ledger could not be read."""

    @model_validator(mode="after")
    def _follows(self) -> VerdictDocument:
        whole = self.model_sha is not None and self.report_sha is not None
        if self.allow and (self.simulation or self.reasons or not whole):
            raise ValueError("the verdict allows a release although it has reasons to deny")
        denying = any(check.outcome == "failed" for check in self.checks)
        if self.allow and denying:
            raise ValueError("the verdict allows a release although one of its rules denies")
        return self

    @property
    def waiting(self) -> bool:
        """Returns whether missing approvals are the only reason."""
        return not self.allow and self.reasons == [NOT_APPROVED]


class Identity(NamedTuple):
    """Name of a release, and the run and attempt that produced its model."""

    name: str
    version: str
    run_id: str
    attempt: int


class ReleaseManifest(Document):
    """`manifest.json` of a bundle; its signature is the seal.

    A copy is `<name>/<version>.json` in the release store, whose exclusive creation is the
    publication; another is the artifact `release` of the pipeline.
    """

    kind: ClassVar[str] = "release"
    role: ClassVar[str | None] = "release"

    name: Name
    version: Name
    run_id: Name
    attempt: Count
    files: dict[Name, Sha]
    """File name -> digest, for every other file of the bundle."""
    sizes: dict[Name, Count]
    """File name -> size in bytes; readers read at most this number of bytes."""

    @property
    def identity(self) -> Identity:
        """Returns what is released."""
        return Identity(self.name, self.version, self.run_id, self.attempt)
