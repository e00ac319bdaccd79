"""Rules for the report as a whole: its time, its equality with a rebuilt one, its approvals."""

from __future__ import annotations

import math
from collections.abc import Iterator
from datetime import datetime, timedelta

from fedemb.foundation.canonical_json import Json, json_digest
from fedemb.gate.privacy_report import build_report
from fedemb.gate.rule import Case, Rule

CLOCK_TOLERANCE = timedelta(minutes=10)
RELATIVE_TOLERANCE = 1e-6
"""Relative tolerance of recomputed floats, for rounding differences between machines."""
LATER_TOLERANCE = 0.01
"""Relative tolerance of recomputed floats with a later version of the accounting library."""


@Rule("correct the clocks, then run account_privacy again")
def clock_skewed(case: Case) -> Iterator[str]:
    """Report dated after the commit and not in the future."""
    made, commit = datetime.fromisoformat(case.report.time), case.attempt.commit
    earliest = datetime.fromisoformat(commit.time) if commit else made
    if not earliest - CLOCK_TOLERANCE <= made <= case.now + CLOCK_TOLERANCE:
        yield "the time of the report is before the commit or in the future"


@Rule()
def report_differs(case: Case) -> Iterator[str]:
    """Report as rebuilt from the evidence, field by field."""
    report, tolerance = case.report, RELATIVE_TOLERANCE
    built = build_report(
        case.evidence, case.plan, case.ledger, time=report.time, head_sequence=case.head
    )
    if not case.same_environment:
        tolerance = LATER_TOLERANCE
        accounting = built.accounting.model_copy(update={"version": report.accounting.version})
        # Another version of NumPy gives other last digits, so the digest is that of the report's
        # own table. The table itself is compared with the recomputed one below.
        table = [row.model_dump(mode="json") for row in report.cumulative.blocks]
        cumulative = built.cumulative.model_copy(update={"block_table_sha": json_digest(table)})
        built = built.model_copy(update={"accounting": accounting, "cumulative": cumulative})
    for path in differences(built.content(), case.signed.content, tolerance=tolerance):
        yield f"{path} of the report differs from the value that the evidence gives"


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


# Approvals come last, so that people review only runs that pass all other rules.


def _overdue(case: Case) -> bool:
    deadline = case.report.approve_by
    return deadline is not None and not case.now <= deadline


def _given(case: Case) -> str:
    return f"{len(case.approvals)}{''.join(f', by {actor}' for actor in case.approvals)}"


def _needed(case: Case) -> str:
    return f"{case.ledger.terms.approvals} approvals of report {case.signed.sha[:12]}"


@Rule(
    "start a new run; later approvals of this report do not count",
    applies=lambda case: case.report.approve_by is not None,
    limit=lambda case: f"{case.report.approve_by:%Y-%m-%d %H:%M} UTC",
)
def no_approval_by_deadline(case: Case) -> Iterator[str]:
    """Approved by the deadline."""
    if _overdue(case) and not len(case.approvals) >= case.ledger.terms.approvals:
        yield (
            f"no approval by {case.report.approve_by:%Y-%m-%d %H:%M} UTC: the policy requires "
            f"{_needed(case)}, and the ledger had {_given(case)} at the deadline"
        )


@Rule(
    "ask the approvers to read the report and run `fedemb approve`, then resume with `fedemb run "
    "--resume RUN --from gate_release`",
    applies=lambda case: case.ledger.terms.approvals != 0,
    value=_given,
    limit=_needed,
)
def not_approved(case: Case) -> Iterator[str]:
    """Approved by the required number of people, with exactly this report."""
    if not _overdue(case) and not len(case.approvals) >= case.ledger.terms.approvals:
        yield f"the policy requires {_needed(case)}, and the ledger has {_given(case)}"
