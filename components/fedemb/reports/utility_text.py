"""Sentences about utility and audit, for pages and headlines."""

from __future__ import annotations

from fedemb.config.policy import Unit
from fedemb.documents.audit import AuditReport, MechanismAudit, finding
from fedemb.documents.fields import Interval, points
from fedemb.documents.utility import LEAST_RESAMPLED, AnyUtility, ClassifierReport, UtilityReport
from fedemb.privacy.mechanism import MechanismPlan
from fedemb.privacy.section import UNITS, count_of
from fedemb.reports.report import figure

_NAMES = {
    "public_backbone": "public backbone",
    "frozen_features": "frozen features",
    "network_output": "output of the imported network",
    "untrained": "untrained network",
    "raw_pixels": "raw pixels",
    "most_frequent": "most frequent class",
    "centralized": "central training without privacy",
    "previous_release": "previous release",
}
"""Model of a utility report -> display name."""


def model_name(name: str, report: AnyUtility) -> str:
    """Returns the display name of a model of a utility report."""
    if name == "public_backbone" and isinstance(report, ClassifierReport):
        head = f"head trained on {report.head_images:,} public photos"
        return head if report.head_images else "untrained head (chance)"
    if name == "public_backbone" and report.public_kind == "none":
        return "untrained initial weights"
    return _NAMES[name]


def covers(unit: Unit) -> str:
    """Returns the units that the guarantee covers, and those that the figures describe."""
    many = UNITS[unit].many
    return (
        f"The privacy guarantee covers training {many} only. The figures are exact, without "
        f"noise, on evaluation {many}, which never train and are not covered."
    )


def _points(estimate: Interval) -> str:
    low, high = sorted((abs(estimate.low), abs(estimate.high)))
    return f"{100 * abs(estimate.value):.1f} points [{100 * low:.1f}, {100 * high:.1f}]"


def compared(difference: Interval, than: str) -> str:
    """Describes a paired difference; only an interval without zero counts as a difference."""
    if difference.low > 0:
        return f"{_points(difference)} more than {than}"
    if difference.high < 0:
        return f"{_points(difference)} less than {than}"
    return f"not distinguishable from {than} ({points(difference)})"


def floors_sentence(least: float | None, no_worse_than: str | None) -> str:
    """Describes what the gate requires by `min_gain_over_public` and `no_worse_than`."""
    floors: list[str] = []
    if least is not None:
        floors.append(
            f"a gain over the best baseline with an interval above {100 * least:g} points"
        )
    if no_worse_than is not None:
        floors.append("figures not certainly worse than those of the previous release")
    return f"The gate requires {' and '.join(floors) or 'no gain'}."


def utility_sentence(report: AnyUtility) -> str:
    """Returns all sentences about the utility of a model."""
    return " ".join(utility_sentences(report))


def utility_sentences(report: AnyUtility) -> list[str]:
    """Returns the main figure with its interval and gain in at most 25 words, then the rest."""
    found = report.headline()
    if found is None:
        needed = (
            "users must include two images of one identity, and two identities"
            if isinstance(report, UtilityReport)
            else f"{report.unit}s are missing"
        )
        return [
            f"Utility could not be measured: held-out {needed}. Increase "
            "partition.evaluation.fraction."
        ]
    if isinstance(report, ClassifierReport):
        name, number = f"top-1 over {report.classes} classes", report.units
    else:
        name, number = report.headline_label, report.evaluated and report.evaluated.identities
    gain = f": {compared(report.gain, 'the best baseline')}" if report.gain else ""
    others = [f"compared with {best_baseline(report)}"] if report.gain else []
    if report.best_baseline not in (None, "public_backbone"):
        others += _compared(report, "public_backbone")
    others += _compared(report, "centralized")
    rest = "; ".join(others)
    return [
        f"{name[0].upper()}{name[1:]} is {_percent(found)} on {number:,} held-out "
        f"{_many(report)}{gain}.",
        *([f"{rest[0].upper()}{rest[1:]}."] if rest else []),
        *filter(None, (_too_few(report), _another_domain(report))),
    ]


def _compared(report: AnyUtility, name: str) -> list[str]:
    difference = report.difference(name)
    return (
        [compared(difference, f"the {model_name(name, report)}")] if difference is not None else []
    )


def _another_domain(report: AnyUtility) -> str:
    """Returns a warning where raw pixels do better than the features of the public backbone."""
    measured = report.measured_baselines
    raw = measured.get("raw_pixels")
    features = (measured.get(name) for name in UtilityReport.features)
    best = max((found.value for found in features if found is not None), default=None)
    if raw is None or best is None or report.public_kind == "none" or best >= raw.low:
        return ""
    return (
        f"Recall of the public backbone is {100 * best:.1f} %, less than raw pixels, "
        f"{_percent(raw)}: it does not suit these photos. Choose a backbone that was trained on "
        "photos of the same kind."
    )


def _many(report: AnyUtility) -> str:
    return "identities" if isinstance(report, UtilityReport) else f"{report.unit}s"


def _too_few(report: AnyUtility) -> str:
    if report.resampled >= LEAST_RESAMPLED:
        return ""
    few = f"fewer than {LEAST_RESAMPLED} {_many(report)}"
    return f"No interval is shown for {few}; increase partition.evaluation.fraction."


def best_baseline(report: AnyUtility) -> str:
    """Returns the baseline of the gain: the best measured one that needs no private data."""
    best = f"the {model_name(report.best_baseline or 'public_backbone', report)}"
    measured = len(report.measured_baselines)
    return f"{best}, the best of {measured} baselines" if measured > 1 else best


def _percent(share: Interval) -> str:
    return f"{100 * share.value:.1f} % [{100 * share.low:.1f}, {100 * share.high:.1f}]"


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
        f"{'contain' if whole else 'do NOT contain'} the noise of their keys; its variance is "
        f"{'' if receipts.scaled else 'NOT '}as planned (a scale {100 * receipts.least_error:.2g} "
        "% wrong would be found with probability 0.999).",
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
            "A membership attack ran for monitoring; it bounds no epsilon. The auditor passed its "
            "self-test. The figures stay in the private root (audit/audit.html)."
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
