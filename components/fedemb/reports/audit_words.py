"""The plain sentences of the audit report.

The gate writes them again from the report's fields and compares: prose could hold any figure. So in
version 1 of the schema they never change.
"""

from __future__ import annotations

from typing import Any

ATTACK = "verification_score"
LIMITATIONS = (
    "It attacks with one simple score. A stronger attack may find more.",
    "It bounds no epsilon, neither from above nor from below: only the accounting can promise, and "
    "only an attack with planted canaries can refute with a stated confidence.",
    "It looks at some users on average. A single unusual user may be exposed and not be seen here.",
    "It sees the final model only, not the rounds.",
    "Training and held-out users may differ for reasons other than training; the comparison with "
    "the public backbone takes most of that out, not all.",
)

_WHERE = (
    "its figures are exact functions of training users, so they stay in the private root "
    "(audit/audit.html), for the data owner"
)


def _range(estimate: dict[str, float]) -> str:
    return f"{estimate['value']:.3f} [{estimate['low']:.3f}, {estimate['high']:.3f}]"


def audit_sentence(report: dict[str, Any]) -> str:
    """One or two sentences: the self-test first, for without it the rest means nothing."""
    if not report["self_test"]["passed"]:
        failed = [n for n, case in report["self_test"]["cases"].items() if not case["passed"]]
        return (
            f"The auditor failed its own test ({', '.join(failed)}), so nothing it says about the "
            "model counts; fix components/audit_privacy before any release."
        )
    if report["figures"] == "private":
        return (
            "Monitoring only: a membership attack was run against the model by an auditor that "
            f"passed its self-test; {_WHERE}."
        )
    if not report["measured"]:
        return (
            "Monitoring only: there are too few users with two images on one of the sides, so the "
            "attack was not run."
        )
    plain, calibrated = report["auroc"], report["calibrated"]["auroc"]
    figures = (
        f"AUROC {_range(plain)}, and {_range(calibrated)} after subtracting the same score under "
        "the public backbone; 0.5 is blind"
    )
    found = {report["finding"], report["calibrated"]["finding"]}
    if report["calibrated"]["finding"] == "leak":
        words = (
            "Training users can be told from held-out ones better than by chance"
            if not report["split_by_value"]
            else "Training users score higher than held-out ones, who come from another population"
        )
    elif "reversed" in found:
        words = (
            "Training users score LOWER than held-out ones: the two sides differ for a reason "
            "other than memory, and the attack is blind to what that hides"
        )
    elif "leak" in found:
        words = "Training users score higher, and so they did before private training"
    else:
        words = "This attack does not tell training users from held-out ones"
    return f"Monitoring only, no bound on epsilon. {words} ({figures})."
