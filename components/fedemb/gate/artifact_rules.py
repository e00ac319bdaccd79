"""Gate rules about the artifacts: they belong together, to the ledger, and hold nothing else."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any

from fedemb.documents.artifacts import json_digest
from fedemb.documents.model_files import tensor_problem
from fedemb.gate.case import RERUN, Case, Reason
from fedemb.gate.differences import LATER_TOLERANCE, RELATIVE_TOLERANCE, differences
from fedemb.keys.trust import verify_document
from fedemb.planted_bug_suite import record_problem
from fedemb.privacy.accounting.events import event_to_json
from fedemb.privacy.mechanisms.mechanism import MechanismPlan
from fedemb.reports.audit_words import ATTACK, LIMITATIONS, audit_sentence
from fedemb.reports.privacy_report import build_report

CLOCK_TOLERANCE = timedelta(minutes=10)
_SHA = re.compile("[0-9a-f]{64}")
_RAW_FIGURES = ("auroc", "tpr_at_fpr", "finding", "calibrated", "measured")
"""Of the audit: exact functions of training users, shown in a simulation only."""


def report_signature(case: Case) -> Iterator[Reason]:
    """The report is signed by a key trusted to sign reports when it was made."""
    verify_document(case.report, case.ledger.chain.trust, "report", at=case.head)
    yield from ()


def bindings(case: Case) -> Iterator[Reason]:
    """Configuration, plan, code, data and weights are those that were reserved and bound."""
    evidence, reservation, bind = case.evidence, case.reservation, case.attempt.bind
    model, users = evidence.model.body, evidence.users.body
    if bind is None:
        return
    bound = {
        "model.run_id": (model["run_id"], reservation.run_id),
        "model.attempt": (model["attempt"], reservation.attempt),
        "model.config_sha": (model["config_sha"], reservation.config_sha),
        "model.plan_sha": (model["plan_sha"], reservation.plan_sha),
        "model.code_sha": (model["code_sha"], reservation.code_sha),
        "model.inputs_sha": (model["inputs_sha"], bind.body["inputs_sha"]),
        "model.backbone": (model["backbone"], evidence.config.model.backbone),
        "model.embedding_dim": (model["embedding_dim"], evidence.config.model.embedding_dim),
        "users.run_id": (users["run_id"], reservation.run_id),
        "users.config_sha": (users["config_sha"], reservation.config_sha),
        "users.reservation_sha": (
            users["reservation_sha"],
            json_digest(dict(evidence.reservation.body)),
        ),
        "users.blocks": (sorted(users["blocks"]), sorted(reservation.blocks)),
        "users.virtual_clients": (users["virtual_clients"], case.plan.virtual_clients),
        "users.groupings": (users["groupings"], case.plan.groupings),
        "users.image_size": (users["image_size"], evidence.config.model.image_size),
        "users.channels": (users["channels"], evidence.config.model.channels),
        "plan.config_sha": (evidence.plan.body["config_sha"], reservation.config_sha),
        "config_sha": (evidence.config_sha, reservation.config_sha),
        "plan.digest": (case.plan.digest, reservation.plan_sha),
        "users.commitments": (users["commitments"], bind.body["commitments"]),
    }
    for name, (found, wanted) in bound.items():
        if found != wanted:
            yield Reason(
                "not_what_was_reserved",
                f"{name} is not what the ledger holds for run {reservation.run_id!r}",
                "release the artifacts of one run together; if something changed since the "
                "reservation, start a run with a new id",
            )
    recomputed = json_digest(
        {
            "plan_sha": reservation.plan_sha,
            "config_sha": reservation.config_sha,
            "initial_weights_sha": model["initial_weights_sha"],
            "data_commitment": users["commitments"]["users"],
            "code_sha": reservation.code_sha,
        }
    )
    if recomputed != bind.body["inputs_sha"]:
        yield Reason(
            "inputs_differ",
            "the digest of all inputs does not follow from plan, configuration, initial weights, "
            "data commitment and code",
            "start a run with a new id",
        )


def rounds(case: Case) -> Iterator[Reason]:
    """The rounds of the model are those that were reserved, logged, signed and committed."""
    evidence, attempt = case.evidence, case.attempt
    if attempt.commit is None:
        return
    started = attempt.commit.body["rounds_started"]
    ran = evidence.model.body["rounds_run"]
    if type(ran) is not int or not ran <= started <= case.reservation.rounds == case.plan.rounds:
        yield Reason(
            "more_rounds_than_reserved",
            f"the model ran {ran} rounds, {started} were committed and "
            f"{case.reservation.rounds} reserved",
            "start a run with a new id that reserves all its rounds",
        )
    if [entry.get("round") for entry in evidence.rounds] != list(range(started)):
        yield Reason(
            "round_log_incomplete",
            "the round log does not hold each committed round once, in order",
            "resume the training, or start a run with a new id",
        )
    if attempt.commit.body["round_log"]["sha"] != evidence.model_files["rounds.jsonl"]:
        yield Reason(
            "round_log_changed",
            "the round log is not the one the trainer signed at commit",
            "take the model artifact from the training step again",
        )
    for index, entry in enumerate(evidence.rounds):
        digest = entry.get("output_sha")
        if not (isinstance(digest, str) and _SHA.fullmatch(digest)) or differences(
            {**public_line(case.plan, index), "output_sha": digest}, dict(entry), tolerance=0.0
        ):
            yield Reason(
                "round_line_differs",
                f"line {index} of the round log is not the public line of its round: number, "
                "planned clients, planned event, digest of the noised output, and nothing else",
                "start a run with a new id",
            )


def public_line(plan: MechanismPlan, index: int) -> dict[str, Any]:
    """What the trainer says of a round, the digest of its output apart; see `RoundLog.commit`."""
    line: dict[str, Any] = {"round": index, "clients_planned": plan.normaliser}
    if not plan.tracks_participation:  # those are priced as a whole
        line["event"] = event_to_json(plan.round_event)
    return line


def audit(case: Case) -> Iterator[Reason]:
    """The audit is there, of this model and code, was itself tested, and refutes nothing."""
    audit, model = case.evidence.audit.body, case.evidence.model.body
    again = "run audit_privacy on this model, then account_privacy"
    levels = (case.evidence.config.policy.audit_level, case.ledger.terms.audit_level)
    if "full" in levels:
        yield Reason(
            "audit_full_missing",
            "the policy asks for audit_level full, and this version audits at monitoring only",
            "start a policy with audit_level: monitoring, and say so to its readers",
        )
    if audit["level"] != "monitoring":
        yield Reason("audit_level_unknown", f"the audit has level {audit['level']!r}", again)
    for name, wanted in (
        ("model_sha", model["weights_sha"]),
        ("code_sha", model["code_sha"]),
        ("run_id", case.reservation.run_id),
        ("config_sha", case.reservation.config_sha),
    ):
        if audit[name] != wanted:
            yield Reason("audit_stale", f"the audit is of another {name}", again)
    if audit["self_test"]["passed"] is not True:
        yield Reason(
            "auditor_blind",
            "the auditor failed its own test, so its finding means nothing",
            "fix components/audit_privacy",
        )
    problem = record_problem(audit["planted_bug_suite"], case.reservation.code_sha)
    if problem:
        yield Reason(
            "planted_bugs_missed",
            problem,
            "run `make planted-bugs` on the code of this run, then audit_privacy and "
            "account_privacy again; with other code, start a run with a new id",
        )
    bound = audit["lower_bound"]  # null says: none was measured
    if bound is not None and not 0 <= bound <= case.report["accounting"]["epsilon"] < math.inf:
        yield Reason(
            "audit_refutes",
            f"the audit's lower bound {bound} is above the certified epsilon, or no bound",
            "do not release; look for the leak",
        )
    words = (audit["attack"], audit["limitations"], audit["sentence"])
    if words != (ATTACK, list(LIMITATIONS), audit_sentence(dict(audit))):
        yield Reason(
            "audit_words_differ",
            "the words of the audit do not follow from its fields, and might hold private figures",
            again,
        )
    if audit["figures"] != "private" or any(audit[name] is not None for name in _RAW_FIGURES):
        yield Reason(
            "audit_figures_open",
            "the audit holds exact figures of training users, which no noise covers",
            again,
        )


def utility(case: Case) -> Iterator[Reason]:
    """The utility report is of this model."""
    utility = case.evidence.utility.body
    for name, wanted in (
        ("model_sha", case.evidence.model.body["weights_sha"]),
        ("run_id", case.reservation.run_id),
        ("config_sha", case.reservation.config_sha),
    ):
        if utility[name] != wanted:
            yield Reason(
                "utility_stale",
                f"the utility report is of another {name}",
                "run evaluate_embeddings on this model, then account_privacy",
            )
    if utility["simulation"] is not False or utility["centralized"] or utility["utility_drop"]:
        yield Reason(
            "utility_without_privacy",
            "the utility report holds figures of a model trained without privacy",
            "run evaluate_embeddings with the configuration of this release",
        )


def model(case: Case) -> Iterator[Reason]:
    """The model is the one the trainer signed, with the backbone's tensors and no other."""
    tensors = [dict(tensor) for tensor in case.evidence.tensors]
    if case.evidence.model.body["weights_sha"] != case.evidence.model_files["backbone.keras"]:
        yield Reason(
            "weights_differ",
            "the model file is not the one whose digest model.json names",
            "take the model artifact from the training step again",
        )
    commit = case.attempt.commit
    if commit is None or commit.body["round_log"]["card_sha"] != case.evidence.model.sha:
        yield Reason(
            "model_card_changed",
            "model.json is not the one the trainer signed at commit: it names weights, tensors and "
            "whose key drew the noise",
            "take the model artifact from the training step again",
        )
    problem = tensor_problem(tensors, list(case.evidence.model.body["tensors"]))
    if problem:
        yield Reason("foreign_tensor", problem, "save the backbone alone, without head or slots")


def pretraining(case: Case) -> Iterator[Reason]:
    """Public images were kept apart from private ones."""
    if case.evidence.config.pretraining.kind == "import":
        yield Reason(
            "pretraining_overlap_unchecked",
            "nobody checked that the imported backbone never saw private images",
            "pretrain from public images, or let the policy owner sign `fedemb ledger waive "
            "pretraining_overlap_unchecked` and resume the run",
        )


def key(case: Case) -> Iterator[Reason]:
    """Noise and coins come from the secret key of the reservation."""
    injected = case.evidence.model.body["key_injected"]
    if case.report["mechanism"]["noise"]["secure"] is not True or injected is not False:
        yield Reason(
            "key_injected",
            "noise or coins did not come from the secret key of the reservation",
            "run again without an injected key",
        )


def clock(case: Case) -> Iterator[Reason]:
    """The report was made after the commit and not in the future."""
    made = datetime.fromisoformat(str(case.report["time"]))
    commit = case.attempt.commit
    earliest = datetime.fromisoformat(commit.time) if commit else made
    if not earliest - CLOCK_TOLERANCE <= made <= case.now + CLOCK_TOLERANCE:
        yield Reason(
            "clock_skewed",
            "the report's time lies before the commit or in the future",
            "set the clocks right, then run account_privacy again",
        )


def rebuilt(case: Case) -> Iterator[Reason]:
    """The whole report follows from the evidence, field by field."""
    expected = build_report(
        case.evidence,
        case.plan,
        case.ledger,
        time=str(case.report["time"]),
        head_sequence=case.head,
    )
    found = {key: value for key, value in case.report.items() if key != "signature"}
    tolerance = RELATIVE_TOLERANCE
    if not case.same_environment:
        tolerance = LATER_TOLERANCE
        expected["accounting"]["version"] = case.report["accounting"]["version"]
    for path in differences(expected, found, tolerance=tolerance):
        yield Reason("report_differs", f"the report's {path} is not what the evidence gives", RERUN)
