"""The verdict of the gate: allowed, or by which rules it was denied."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import model_validator

from fedemb.documents.document import Document, Since
from fedemb.documents.fields import Code, Name, Sha


class VerdictDocument(Document):
    """Written by gate_release. What the rules say in words is in its log and its error."""

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

    @model_validator(mode="after")
    def _follows(self) -> VerdictDocument:
        whole = self.model_sha is not None and self.report_sha is not None
        if self.allow and (self.simulation or self.reasons or not whole):
            raise ValueError("it allows what it has reasons to deny")
        return self
