"""The page of the audit report."""

from __future__ import annotations

from typing import Any

from fedemb.reports import report as pages

_CASES = {
    "no_leak": "no leak planted",
    "planted_leak": "leak planted",
    "reversed_sign": "leak planted, sign of the score reversed",
    "missing_score": "one score missing",
    "missing_side": "one side missing",
}
_WANTED = {
    "no_leak": "AUROC 0.5, few alarms",
    "planted_leak": "leak found",
    "reversed_sign": "reported as reversed",
    "missing_score": "error",
    "missing_side": "error",
}


def _seen(case: dict[str, Any]) -> str:
    if "auroc" not in case:
        return "error" if case["passed"] else "accepted"
    alarms = f", {case['alarms']} alarms in {case['trials']}" if "alarms" in case else ""
    return f"AUROC {case['auroc']:.3f}{alarms}"


def audit_page(report: dict[str, Any]) -> str:
    """Renders `audit_report.html`; the same report gives the same bytes."""
    passed = report["self_test"]["passed"]
    leak = bool(report["calibrated"]) and report["calibrated"]["finding"] == "leak"
    chart = None
    if report["auroc"]:
        bars = [
            pages.Bar(name, estimate["value"], estimate["low"], estimate["high"], series)
            for series, (name, estimate) in enumerate(
                [
                    ("score", report["auroc"]),
                    ("minus before training", report["calibrated"]["auroc"]),
                ]
            )
        ]
        alt = "AUROC of the attack with 95 % intervals: " + ", ".join(
            f"{bar.name} {bar.value:.3f}" for bar in bars
        )
        chart = pages.bar_chart(
            bars, x_label="AUROC (0.5 is blind)", alt=alt, x_limits=(0.0, 1.0), reference=0.5
        )
    return pages.render(
        "audit_report.html",
        tone="bad" if leak or not passed else "plain",
        report=report,
        chart=chart,
        cases=[
            (_CASES[name], _WANTED[name], _seen(case), case["passed"])
            for name, case in report["self_test"]["cases"].items()
        ],
    )
