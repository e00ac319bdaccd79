"""Page of the audit report."""

from __future__ import annotations

from fedemb.documents.audit import AuditReport, SelfTest, finding
from fedemb.privacy.mechanisms.mechanism import MechanismPlan
from fedemb.reports.audit_words import LIMITATIONS, attack_sentences, audit_answer
from fedemb.reports.charts import bar_chart
from fedemb.reports.formats import figure
from fedemb.reports.report import render

_CASES = {
    "no_leak": ("no leak planted", "AUROC 0.5, few alarms"),
    "planted_leak": ("leak planted", "leak found"),
    "reversed_sign": ("leak planted, sign of the score reversed", "reported as reversed"),
    "missing_score": ("one score missing", "error"),
    "missing_side": ("one side missing", "error"),
}
"""Self-test case -> description of the case, and the expected finding."""


def _seen(self_test: SelfTest) -> dict[str, str]:
    nulls = self_test.no_leak
    return {
        "no_leak": f"AUROC {nulls.auroc:.3f}, {nulls.alarms} alarms in {nulls.trials}",
        "planted_leak": f"AUROC {figure(self_test.planted_leak)}",
        "reversed_sign": f"AUROC {figure(self_test.reversed_sign)}",
        "missing_score": "error" if self_test.missing_score_refused else "accepted",
        "missing_side": "error" if self_test.missing_side_refused else "accepted",
    }


_TONES = {"Yes": "good", "No": "bad", "Unknown": "plain"}
"""Answer of the audit -> colour of the page."""


def audit_page(report: AuditReport, plan: MechanismPlan) -> str:
    """Renders `audit_report.html`; the same report and plan give the same bytes."""
    failed, seen = report.self_test.failed, _seen(report.self_test)
    leak, chart = False, None
    if report.measured is not None:
        plain, calibrated = report.measured.plain.auroc, report.measured.calibrated.auroc
        leak = finding(calibrated) == "leak"
        chart = bar_chart(
            [("score", plain), ("minus before training", calibrated)],
            x_label="AUROC (0.5: no signal)",
            alt="AUROC of the attack with 95 % intervals",
            x_limits=(0.0, 1.0),
            reference=0.5,
        )
    answer = audit_answer(report, plan)
    return render(
        "audit_report.html",
        tone="bad" if leak else _TONES[answer.partition(":")[0]],
        answer=answer,
        report=report,
        sentences=attack_sentences(report),
        limitations=LIMITATIONS,
        chart=chart,
        cases=[(*words, seen[name], name not in failed) for name, words in _CASES.items()],
    )
