"""Checklist text: the value that each gate rule checks, and its threshold.

This module decides nothing. `decide` decides by the reasons of the rules and shows these texts with
the outcome. A value that cannot be computed is left empty.
"""

from __future__ import annotations

from collections.abc import Callable

from fedemb.documents.classifier import ClassifierReport
from fedemb.documents.ledger_record import BindRecord, CommitRecord
from fedemb.gate.case import Case
from fedemb.privacy.planning.prices import guarantee_of
from fedemb.reports.formats import points

LENGTH = 200
"""Maximum number of characters of a value or threshold."""

Seen = tuple[str, str]
"""Value and threshold."""


def value_and_threshold(case: Case, rule: str) -> Seen:
    """Returns the value and threshold of a rule; both are empty for a rule without an entry."""
    show = _ROWS.get(rule)
    if show is None:
        return "", ""
    threshold, value = show
    return _line(case, value), _line(case, threshold)


def _line(case: Case, text: str | Callable[[Case], str]) -> str:
    if not isinstance(text, str):
        try:
            text = text(case)
        except Exception:  # the rule itself gives the reason
            return ""
    return one_line(text)


def one_line(text: str) -> str:
    """Returns a text as one printable line of at most `LENGTH` characters."""
    shown = " ".join("".join(sign if sign.isprintable() else " " for sign in text).split())
    return shown if len(shown) <= LENGTH else shown[: LENGTH - 1] + "…"


def _key(case: Case) -> str:
    signature = case.signed.signature
    return f"signed by key {signature['key_id'][:12]}" if signature else "not signed"


def _documents(case: Case) -> str:
    signed = [document.signature is not None for document in case.evidence.signed]
    return f"{sum(signed)} of {len(signed)} documents signed"


def _spent(case: Case) -> str:
    worst = max(case.ledger.spent(block).epsilon for block in case.reservation.blocks)
    return f"ledger record {case.head}; fullest block at epsilon {worst:.4g}"


def _bound(case: Case) -> str:
    bind = case.attempt.bind
    return "nothing bound" if bind is None else f"inputs {bind.content(BindRecord).inputs_sha[:12]}"


def _rounds(case: Case) -> str:
    commit = case.attempt.commit
    started = commit.content(CommitRecord).rounds_started if commit else 0
    ran = case.evidence.model.body.rounds_run
    return f"{ran} rounds run, {started} committed, {len(case.evidence.rounds)} logged"


def _epsilon(case: Case) -> str:
    delta = case.evidence.config.policy.delta
    return f"epsilon {guarantee_of(case.plan, delta).epsilon:.4g}, delta {delta:g}"


def _caps(case: Case) -> str:
    terms = case.ledger.terms
    return f"epsilon at most {terms.epsilon_cap:g}, delta below 1/{terms.users_lower_bound}"


def _approvals(case: Case) -> str:
    model = case.evidence.model.body.weights_sha
    given = case.ledger.state.approvals_of(model, case.signed.sha, case.report.approve_by)
    return f"{len(given)} given" + "".join(f", {record.actor}" for record in given)


def _approvals_needed(case: Case) -> str:
    deadline = case.report.approve_by
    until = "" if deadline is None else f" by {deadline:%Y-%m-%d %H:%M} UTC"
    return f"{case.ledger.terms.approvals} approvals of this report{until}"


def _audit(case: Case) -> str:
    audit = case.evidence.audit.body
    failed = ", ".join(audit.self_test.failed) or "passed"
    return f"level {audit.level}; self-test {failed}"


def _least_gain(case: Case) -> str:
    least = case.evidence.config.release.min_gain_over_public
    return "no floor" if least is None else f"interval above {100 * least:g} points"


def _log_loss(case: Case) -> str:
    utility = case.evidence.utility.body
    own = utility.log_loss("model") if isinstance(utility, ClassifierReport) else None
    return "not a classifier" if own is None else f"{own.value:.3g}"


def _least_log_loss(case: Case) -> str:
    utility = case.evidence.utility.body
    best = utility.best_log_loss if isinstance(utility, ClassifierReport) else None
    if best is None:
        return "no floor"
    return f"not significantly above {best:.3g}, the log loss of the best baseline"


def _least_change(case: Case) -> str:
    named = case.evidence.config.release.no_worse_than
    return "no floor" if named is None else "not certainly worse than the previous release"


def _tuning(case: Case) -> str:
    return f"{case.report.tuning.other_runs_before} other runs in the ledger before this one"


def _tuning_runs(case: Case) -> str:
    return f"at least {case.evidence.config.tuning.private_runs} private tuning runs in the ledger"


_ROWS: dict[str, tuple[str | Callable[[Case], str], Callable[[Case], str]]] = {
    "report_unsigned": ("a key trusted to sign privacy reports", _key),
    "document_unsigned": ("every document signed by its step", _documents),
    "ledger_broken": (
        lambda case: f"whole, and no block above epsilon {case.ledger.terms.epsilon_cap:g}",
        _spent,
    ),
    "reservation_invalid": (
        "committed, purpose release",
        lambda case: f"{case.attempt.status}, purpose {case.reservation.purpose}",
    ),
    "not_what_was_reserved": ("the inputs that were reserved and bound", _bound),
    "rounds_invalid": (lambda case: f"all {case.plan.rounds} planned rounds", _rounds),
    "mechanism_invalid": (
        "a mechanism with a proof and a valid accountant",
        lambda case: f"{case.plan.kind} under {case.plan.relation.name}",
    ),
    "epsilon_invalid": (_caps, _epsilon),
    "tuning_invalid": (_tuning_runs, _tuning),
    "audit_invalid": ("of this model, passed, nothing refuted", _audit),
    "model_invalid": (
        "the weights the trainer signed, no other tensor",
        lambda case: f"weights {case.evidence.model_files['backbone.keras'][:12]}",
    ),
    "key_invalid": (
        "noise and coins from the secret key of the reservation",
        lambda case: (
            "a key was injected"
            if case.evidence.model.body.key_injected
            else "the secret key of the reservation"
        ),
    ),
    "pretraining_invalid": (
        "public images checked against private ones",
        lambda case: f"overlap: {case.report.pretraining.overlaps_private}",
    ),
    "utility_invalid": (
        "measured on this model as configured",
        lambda case: f"report of model {case.evidence.utility.body.model_sha[:12]}",
    ),
    "no_gain_over_public": (_least_gain, lambda case: points(case.evidence.utility.body.gain)),
    "log_loss_above_baseline": (_least_log_loss, _log_loss),
    "worse_than_previous_release": (
        _least_change,
        lambda case: points(case.evidence.utility.body.difference("previous_release")),
    ),
    "clock_invalid": (
        "after the commit, not in the future",
        lambda case: f"report of {case.report.time}",
    ),
    "report_differs": (
        "equal to the report rebuilt from the evidence",
        lambda case: f"report {case.signed.sha[:12]}",
    ),
    "approvals_invalid": (
        _approvals_needed,
        _approvals,
    ),
}
"""Rule -> threshold and value."""
