"""Findings about a cluster: ok, unsafe or could not tell, each with its remedy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fedemb.errors import Refused

State = Literal["ok", "unsafe", "could not tell"]


@dataclass(frozen=True)
class Finding:
    """Result of one check."""

    check: str
    """Its name; a profile accepts an unsafe one by it."""
    state: State
    what: str
    """Observed state."""
    remedy: str = ""
    """Remedy; empty if ok."""


def judged(check: str, safe: bool, what: str, remedy: str) -> Finding:
    """Something that was read: ok, or unsafe with its remedy."""
    return Finding(check, "ok", what) if safe else Finding(check, "unsafe", what, remedy)


def unread(check: str, things: str) -> Finding:
    """Part of the cluster that the caller may not read."""
    what = f"{things} could not be read"
    return Finding(check, "could not tell", what, f"ask who may read {things}")


def table(findings: Sequence[Finding], accepted: Sequence[str] = ()) -> str:
    """One line for each finding, the unsafe ones first."""
    order = {"unsafe": 0, "could not tell": 1, "ok": 2}
    lines = []
    for finding in sorted(findings, key=lambda finding: order[finding.state]):
        state = "accepted" if _is_accepted(finding, accepted) else finding.state
        remedy = f"; {finding.remedy}" if finding.remedy else ""
        lines.append(f"{state:<15} {finding.check:<14} {finding.what}{remedy}")
    return "\n".join(lines)


def require_safe(findings: Sequence[Finding], accepted: Sequence[str] = ()) -> None:
    """Raises unless every unsafe finding is named by the profile.

    Raises:
      Refused: one is not.
    """
    open_ones = [
        finding
        for finding in findings
        if finding.state == "unsafe" and not _is_accepted(finding, accepted)
    ]
    if open_ones:
        first = open_ones[0]
        raise Refused(
            f"{len(open_ones)} finding(s) on this cluster are unsafe, first {first.check}: "
            f"{first.what}; {first.remedy}, or name it in the profile's `accepts`"
        )


def _is_accepted(finding: Finding, accepted: Sequence[str]) -> bool:
    return finding.state == "unsafe" and finding.check in accepted
