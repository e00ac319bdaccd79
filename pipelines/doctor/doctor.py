"""Findings about a cluster, each with its remedy, and what a check may read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from fedemb.config import RunConfig
from fedemb.errors import Refused
from fedemb.pipelines.compile.cluster import Profile
from fedemb.pipelines.schedules.kubernetes_api import Answer, KubernetesApi

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


def judged(check: str, safe: bool | None, what: str, remedy: str) -> Finding:
    """Something that was read: ok, or unsafe with its remedy; None: it could not be read."""
    if safe is None:
        return Finding(check, "could not tell", what, "ask who may read it")
    return Finding(check, "ok" if safe else "unsafe", what, "" if safe else remedy)


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


@dataclass(frozen=True)
class Doctor:
    """APIs that a check of a cluster reads, and the expected state."""

    api: KubernetesApi
    namespace: str
    """Namespace of the runs."""
    profile: Profile
    configs: Sequence[RunConfig] = ()
    """Configurations of the runs, which name the stores."""

    def mine(self, path: str) -> str:
        """Path of something of the namespace."""
        group, _, rest = path.rpartition("|")
        root = f"/apis/{group}" if group else "/api/v1"
        return f"{root}/namespaces/{self.namespace}/{rest}"

    def get(self, path: str) -> Answer:
        """Reads something of the namespace."""
        return self.api.get(self.mine(path))


Check = Callable[[Doctor], Iterator[Finding]]
