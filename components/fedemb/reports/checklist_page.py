"""Page of the gate checklist: every rule with value, threshold and outcome."""

from __future__ import annotations

from fedemb.documents.verdict import VerdictDocument
from fedemb.reports.headline import RunFacts, headline
from fedemb.reports.report import render


def checklist_page(verdict: VerdictDocument, run_id: str) -> str:
    """Renders `gate_checklist.html`; the same verdict gives the same bytes."""
    counted = {
        outcome: sum(check.outcome == outcome for check in verdict.checks)
        for outcome in ("passed", "waived", "failed", "not_applicable")
    }
    found = headline(RunFacts(verdict))
    tone = found.tone if not verdict.allow else "plain" if verdict.waived else "good"
    return render(
        "gate_checklist.html",
        tone=tone,
        title="Allowed" if verdict.allow else found.title,
        verdict=verdict,
        run_id=run_id,
        counted=counted,
    )
