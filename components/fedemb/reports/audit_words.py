"""Text of the audit report, generated from its fields."""

from __future__ import annotations

from fedemb.config.policy import Unit
from fedemb.documents.audit import AuditReport, MechanismAudit, finding
from fedemb.privacy.accounting.units import count_of
from fedemb.privacy.mechanisms.mechanism import MechanismPlan
from fedemb.reports.formats import figure

LIMITATIONS = (
    "It uses one simple score. A stronger attack may find more.",
    "The attack does not bound epsilon. Only the accounting guarantees epsilon.",
    "It averages over many. A single unusual one may be exposed without being detected.",
    "It uses the final model only, not the rounds.",
    "Training and held-out users may differ for reasons other than training. The comparison with "
    "the public backbone removes most of this difference, not all.",
)


def mechanism_sentences(audit: MechanismAudit, unit: Unit) -> list[str]:
    """Returns the evidence that the accounted mechanism ran: a short sentence for each check."""
    receipts = audit.receipts
    whole = not receipts.failed and receipts.together
    return [
        f"The outputs of {count_of(receipts.rounds, 'round')} "
        f"{'contain' if whole else 'do NOT contain'} the noise of their keys.",
        f"The committed means {'give' if audit.fold.same else 'do NOT give'} the released weights.",
        f"The replay of {count_of(audit.replay.rounds, 'round')} without one of their {unit}s "
        f"{'gave the expected sums' if not audit.replay.failed else 'FAILED'}.",
    ]


def audit_answer(report: AuditReport, plan: MechanismPlan) -> str:
    """Returns yes or no: whether the accounted mechanism ran, as far as the audit can detect."""
    who = f"{report.unit}s"
    if report.self_test.failed:
        return "No: the auditor failed its self-test, so its result is not valid."
    calibrated = report.measured and report.measured.calibrated.auroc
    if calibrated is not None and finding(calibrated) == "leak" and not report.split_by_value:
        return f"No: training {who} are distinguishable from held-out ones."
    if report.mechanism is None:
        return "Unknown: this audit has no evidence that the priced mechanism ran."
    failed = report.mechanism.failed(plan)
    if failed:
        names = ", ".join(code.replace("_", " ") for code in failed)
        return f"No: the priced mechanism did not run as planned ({names})."
    return "Yes: the priced mechanism ran; all checks passed."


def audit_sentence(report: AuditReport) -> str:
    """Returns short sentences: each check of the mechanism, then the attack."""
    found = attack_sentences(report)
    if report.mechanism is not None:
        found = mechanism_sentences(report.mechanism, report.unit) + found
    return " ".join(found)


def attack_sentences(report: AuditReport) -> list[str]:
    """Returns the result of the attack; the self-test first, because the attack depends on it."""
    failed, who = report.self_test.failed, f"{report.unit}s"
    if failed:
        return [
            f"The auditor failed its self-test ({', '.join(failed)}), so its result is not valid.",
            "Fix components/audit_privacy before any release.",
        ]
    if report.figures == "private":
        return [
            "A membership attack was run for monitoring, by an auditor that passed its self-test.",
            f"Its figures are exact functions of training {who}. They stay in the private root "
            "(audit/audit.html) for the data owner.",
        ]
    if report.measured is None:
        return [
            f"The membership attack was not run: one side has too few {who} with a score, or the "
            "model returns values that are not finite."
        ]
    plain, calibrated = report.measured.plain.auroc, report.measured.calibrated.auroc
    if finding(calibrated) == "leak":
        words = (
            f"Training {who} can be distinguished from held-out ones better than by chance"
            if not report.split_by_value
            else f"Training {who} score higher than held-out ones, which are of another population"
        )
    elif "reversed" in (finding(plain), finding(calibrated)):
        words = (
            f"Training {who} score LOWER than held-out ones: the two sides differ for a reason "
            "other than training, so the attack is not valid"
        )
    elif finding(plain) == "leak":
        words = f"Training {who} score higher, as they did before private training"
    else:
        words = f"This attack does not distinguish training {who} from held-out ones"
    return [
        "Monitoring only, no bound on epsilon.",
        f"{words}.",
        f"AUROC is {figure(plain)}, and {figure(calibrated)} after subtracting the score of the "
        "public backbone; 0.5 means no signal.",
    ]
