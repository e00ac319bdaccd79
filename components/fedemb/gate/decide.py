"""The gate: a pure function of evidence, report and ledger, which fails closed.

Every rule recomputes the values that it checks. A rule that cannot be evaluated denies: comparisons
are written so that NaN and missing values deny, and an unexpected error inside a rule is a separate
reason. The gate cannot be overridden. A waiver is a record signed by the policy owner, for one
model and one of the few rules that need judgement.

Specification: docs/reference/gate.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime

from fedemb.documents.evidence import Evidence, sentence_of
from fedemb.documents.ledger_record import DecisionRecord
from fedemb.documents.privacy_report import PrivacyReport
from fedemb.documents.verdict import AppliedWaiver, GivenApproval, RuleOutcome
from fedemb.errors import StorageError
from fedemb.foundation.document import Written
from fedemb.gate import artifact_rules as artifacts
from fedemb.gate import privacy_rules as privacy
from fedemb.gate import utility_rules as utility
from fedemb.gate.case import RERUN, Case, Reason, Verdict
from fedemb.gate.checklist import one_line, value_and_threshold
from fedemb.ledger import Ledger

WAIVABLE = (
    "delta_above_customary",
    "pretraining_overlap_unchecked",
    "stopped_early",
    "no_gain_over_public",
    "log_loss_above_baseline",
    "worse_than_previous_release",
)
"""Rules that the policy owner may waive for one model; all others check arithmetic or integrity."""

RULES: tuple[tuple[str, Callable[[Case], Iterator[Reason]]], ...] = (
    ("report_unsigned", artifacts.report_signature),
    ("document_unsigned", artifacts.signatures),
    ("ledger_broken", privacy.ledger),
    ("reservation_invalid", privacy.reservation),
    ("not_what_was_reserved", artifacts.bindings),
    ("rounds_invalid", artifacts.rounds),
    ("mechanism_invalid", privacy.mechanism),
    ("epsilon_invalid", privacy.epsilon),
    ("tuning_invalid", privacy.tuning),
    ("audit_invalid", artifacts.audit),
    ("model_invalid", artifacts.model),
    ("key_invalid", artifacts.key),
    ("pretraining_invalid", artifacts.pretraining),
    ("utility_invalid", utility.measured_as_asked),
    ("no_gain_over_public", utility.gain_over_public),
    ("log_loss_above_baseline", utility.useful_probabilities),
    ("worse_than_previous_release", utility.no_worse_than_previous),
    ("clock_invalid", artifacts.clock),
    ("report_differs", artifacts.rebuilt),
    ("approvals_invalid", privacy.approvals),
)
"""Rules in order of importance, each with the reason code for a rule that cannot be evaluated.

Approvals come last, so that people review only runs that pass all other rules.
"""


def decide(
    evidence: Evidence,
    report: Written[PrivacyReport],
    ledger: Ledger,
    *,
    now: datetime | None = None,
    same_environment: bool = True,
) -> Verdict:
    """Allows or denies a release.

    Args:
      evidence: documents of the run.
      report: signed privacy report.
      ledger: ledger of the run's policy, refreshed; it provides the trusted keys.
      now: current time, for the clock rule.
      same_environment: False when a bundle is verified later, possibly with a newer accounting
        library: the version may differ, and recomputed figures may differ by 1 %.

    Raises:
      StorageError: a store cannot be reached and no verdict is made; retry.

    Returns:
      The verdict: every reason, in order of importance. It allows only if all rules could be
      evaluated and every reason is waived.
    """
    case = Case(evidence, report, ledger, now or datetime.now(UTC), same_environment)
    found: dict[str, list[Reason]] = {}
    for code, rule in RULES:
        found[code] = []
        try:
            found[code] += rule(case)
        except StorageError:  # no fault was found: a retry may allow
            raise
        except Exception as error:  # fails closed: any error inside a rule denies
            found[code].append(Reason(code, sentence_of(error), RERUN))
    reasons = [reason for given in found.values() for reason in given]
    waived = _waived(case, reasons)
    left = tuple(dict.fromkeys(reason for reason in reasons if reason.code not in waived))
    simulation = evidence.config.purpose == "simulation"
    checks = tuple(_check(case, code, given, waived) for code, given in found.items())
    return Verdict(not left and not simulation, left, simulation, tuple(sorted(waived)), checks)


def _check(case: Case, rule: str, reasons: list[Reason], waived: set[str]) -> RuleOutcome:
    codes = list(dict.fromkeys(reason.code for reason in reasons))
    denied = any(code not in waived for code in codes)
    outcome = "denied" if denied else "waived" if codes else "passed"
    value, threshold = value_and_threshold(case, rule)
    return RuleOutcome(rule=rule, outcome=outcome, value=value, threshold=threshold, reasons=codes)


def _waived(case: Case, reasons: list[Reason]) -> set[str]:
    """Returns codes that the policy owner waived for this model in a record the report lists."""
    try:
        model = case.evidence.model.body.weights_sha
        signed = case.ledger.state.waivers_of(model, case.head).keys()
    except Exception:  # fails closed: no waiver
        return set()
    return {reason.code for reason in reasons if reason.code in WAIVABLE} & signed


def applied_waivers(
    ledger: Ledger, waived: Sequence[str], report: PrivacyReport
) -> list[AppliedWaiver]:
    """Returns the waivers that a verdict depends on."""
    signed = ledger.state.waivers_of(report.model_sha, report.cumulative.ledger_sequence)
    return [
        AppliedWaiver(
            code=code,
            actor=signed[code].actor,
            reason=one_line(signed[code].content(DecisionRecord).reason),
            sequence=signed[code].sequence,
        )
        for code in waived
    ]


def given_approvals(
    ledger: Ledger, model_sha: str, report_sha: str, until: datetime | None
) -> list[GivenApproval]:
    """Returns the approvals of a model with a report by its deadline."""
    given = ledger.state.approvals_of(model_sha, report_sha, until)
    return [GivenApproval(actor=record.actor, sequence=record.sequence) for record in given]
