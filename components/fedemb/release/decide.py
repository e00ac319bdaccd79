"""The gate: a pure function of evidence, report and ledger, which fails closed.

Every rule recomputes the values that it checks. A rule that cannot be evaluated denies: an
unexpected error inside a rule is a reason that nothing waives. The gate cannot be overridden. A
waiver is a record signed by the policy owner, for one model and one of the few rules that need
judgement.

Rules: docs/reference/gate.md.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from fedemb.config import RunConfig
from fedemb.documents.evidence import Evidence, sentence_of
from fedemb.documents.ledger_record import DecisionRecord, ReleaseRecord
from fedemb.documents.model import stored_tensors, tensor_problem
from fedemb.documents.privacy_report import PrivacyReport
from fedemb.documents.verdict import AppliedWaiver, GivenApproval, RuleOutcome
from fedemb.errors import ArtifactError, BudgetExceeded, Refused, StorageError
from fedemb.foundation.document import Written
from fedemb.ledger import Ledger
from fedemb.privacy.mechanism import MechanismPlan
from fedemb.release import model_rules, privacy_rules
from fedemb.release.rule import RERUN, Case, Charge, Reason, Rule, Verdict

LENGTH = 200
"""Maximum number of characters of a value or limit."""

RULES = tuple(
    rule
    for module in (privacy_rules, model_rules)
    for rule in vars(module).values()
    if isinstance(rule, Rule)
)
"""Every rule that these modules define, in order of importance."""

WAIVABLE = tuple(rule.code for rule in RULES if rule.waivable)

_log = logging.getLogger(__name__)


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
    signed, left, checks = _waivers(case), list[Reason](), list[RuleOutcome]()
    for rule in RULES:
        reasons = _reasons(rule, case)
        denying = [item for item in reasons or () if not (item.waivable and item.code in signed)]
        left += denying
        outcome = "failed" if denying else "waived" if reasons else "passed"
        applies = reasons is not None
        checks.append(
            RuleOutcome(
                rule=rule.code,
                text=rule.text,
                outcome=outcome if applies else "not_applicable",
                value=_line(rule.value, case) if applies else "",
                limit=_line(rule.limit, case) if applies else "",
            )
        )
    causes: dict[str, Reason] = {}  # one cause that several rules meet is one reason
    for reason in left:
        causes.setdefault(reason.sentence, reason)
    simulation = evidence.config.purpose == "simulation"
    return Verdict(
        not left and not simulation,
        tuple(causes.values()),
        simulation,
        tuple(sorted(check.rule for check in checks if check.outcome == "waived")),
        tuple(checks),
    )


def _reasons(rule: Rule, case: Case) -> list[Reason] | None:
    """Returns the reasons of a rule; None if it does not apply."""
    try:
        if not rule.applies(case):
            return None
        return [Reason(rule.code, text, rule.advice, rule.waivable) for text in rule.check(case)]
    except StorageError:  # no fault was found: a retry may allow
        raise
    except Exception as error:  # fails closed: any error inside a rule denies
        return [Reason(rule.code, sentence_of(error), RERUN)]


def _line(shown: Callable[[Case], str], case: Case) -> str:
    try:
        return one_line(shown(case))
    except Exception:  # the rule itself gives the reason
        return ""


def one_line(text: str) -> str:
    """Returns a text as one printable line of at most `LENGTH` characters."""
    shown = " ".join("".join(sign if sign.isprintable() else " " for sign in text).split())
    return shown if len(shown) <= LENGTH else shown[: LENGTH - 1] + "…"


def _waivers(case: Case) -> set[str]:
    """Returns codes that the policy owner waived for this model in a record the report lists."""
    try:
        return set(case.ledger.state.waivers_of(case.model.weights_sha, case.head))
    except Exception:  # fails closed: no waiver
        return set()


def check_before_charge(
    config: RunConfig, plan: MechanismPlan, ledger: Ledger, *, run_id: str, start: tuple[Path, str]
) -> None:
    """Refuses a release run that the gate would deny later, and warns of rules with a waiver.

    `start` is the `.keras` file of the public backbone and the digest of its bytes.

    Raises:
      BudgetExceeded: this run alone is above the policy's cap.
      Refused: the gate would deny the run; the message has the first reason and the remedy.
      ArtifactError: the public backbone cannot be read without Keras, has a tensor that no
        backbone has, or NaN or infinite weights; its models could not pass the gate.
      UnsupportedAccounting: the accounting library is too old.
    """
    charge = Charge(config, plan, ledger, len(ledger.state.committed_runs() - {run_id}))
    for rule in RULES:
        for problem in rule.before(charge) if rule.before else ():
            if rule.waivable:
                _log.warning("%s: %s. The gate denies unless it is waived", rule.code, problem)
                continue
            kind = BudgetExceeded if rule.code == "epsilon_above_cap" else Refused
            raise kind(
                f"{problem}, so the gate would deny the release. Nothing was charged. Correct the "
                f"cause: {rule.remedy}"
            )
    try:
        tensors = stored_tensors(*start)
    except ArtifactError as error:
        raise ArtifactError(f"{error}. Nothing was charged. Use another backbone") from error
    if foreign := tensor_problem(tensors, tensors):
        raise ArtifactError(
            f"the public backbone cannot be released: {foreign}. Nothing was charged. Use another "
            "backbone"
        )
    if config.release.no_worse_than and config.evaluation.previous_release is None:
        _log.warning(
            "worse_than_previous_release: release.no_worse_than is set, but not "
            "evaluation.previous_release. Set it to the release to compare with"
        )
    name, version = config.released_as(run_id)
    released = (
        record.content(ReleaseRecord)
        for attempt in ledger.state.attempts.values()
        if attempt.reserve.run_id != run_id
        for record in attempt.releases
    )
    if any((release.name, release.version) == (name, version) for release in released):
        _log.warning("%s %s is released already; set another release.version", name, version)


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
