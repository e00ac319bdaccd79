"""Gate rules for artifacts: they match each other and the ledger, and contain nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta

from fedemb.config.digest import config_digest
from fedemb.documents.audit import attack_on
from fedemb.documents.ledger_record import BindRecord, CommitRecord
from fedemb.documents.model import RoundLine
from fedemb.documents.model_files import tensor_problem
from fedemb.errors import SignatureInvalid
from fedemb.foundation.canonical_json import json_digest
from fedemb.gate.case import RERUN, Case, Reason, waiver
from fedemb.gate.differences import LATER_TOLERANCE, RELATIVE_TOLERANCE, differences
from fedemb.privacy.accounting.events import event_to_json
from fedemb.privacy.mechanisms.mechanism import MechanismPlan
from fedemb.reports.privacy_report import build_report

CLOCK_TOLERANCE = timedelta(minutes=10)


def report_signature(case: Case) -> Iterator[Reason]:
    """Checks that the report is signed by a key trusted for reports at the time of signing."""
    case.ledger.chain.trust.check(case.signed, at=case.head)
    yield from ()


def signatures(case: Case) -> Iterator[Reason]:
    """Checks that every document is signed by its step, with a key trusted for this run."""
    for document, at in case.evidence.counting(case.reservation.sequence, case.head):
        try:
            case.ledger.chain.trust.check(document, at=at)
        except SignatureInvalid as error:
            yield Reason(
                "document_unsigned",
                str(error),
                "run the step that writes it again, then what follows",
            )


def bindings(case: Case) -> Iterator[Reason]:
    """Checks that configuration, plan, code, data and weights match the reservation and binding."""
    evidence, reservation, bind = case.evidence, case.reservation, case.attempt.bind
    model, users = evidence.model.body, evidence.users.body
    if bind is None:
        return
    content = bind.content(BindRecord)
    bound: dict[str, tuple[object, object]] = {
        "model.run_id": (model.run_id, reservation.run_id),
        "model.attempt": (model.attempt, reservation.attempt),
        "model.config_sha": (model.config_sha, reservation.config_sha),
        "model.plan_sha": (model.plan_sha, reservation.plan_sha),
        "model.code_sha": (model.code_sha, reservation.code_sha),
        "model.inputs_sha": (model.inputs_sha, content.inputs_sha),
        "model.backbone": (model.backbone, evidence.config.model.backbone),
        "model.embedding_dim": (model.embedding_dim, evidence.config.model.embedding_dim),
        "users.run_id": (users.run_id, reservation.run_id),
        "users.config_sha": (users.config_sha, reservation.config_sha),
        "users.reservation_sha": (users.reservation_sha, evidence.reservation.sha),
        "users.blocks": (sorted(users.blocks), sorted(reservation.blocks)),
        "users.virtual_clients": (users.virtual_clients, case.plan.virtual_clients),
        "users.groupings": (users.groupings, case.plan.groupings),
        "users.image_size": (users.image_size, evidence.config.model.image_size),
        "users.channels": (users.channels, evidence.config.model.channels),
        "plan.config_sha": (evidence.plan.body.config_sha, reservation.config_sha),
        "config_sha": (evidence.config_sha, reservation.config_sha),
        "plan.digest": (case.plan.digest, reservation.plan_sha),
        "users.commitments": (users.commitments.model_dump(), content.commitments),
    }
    for name, (found, wanted) in bound.items():
        if found != wanted:
            yield Reason(
                "not_what_was_reserved",
                f"{name} differs from the reservation of run {reservation.run_id!r}",
                "release the artifacts of one run together; if something changed since the "
                "reservation, start a run with a new id",
            )
    recomputed = json_digest(
        {
            "plan_sha": reservation.plan_sha,
            "config_sha": reservation.config_sha,
            "initial_weights_sha": model.initial_weights_sha,
            "data_commitment": users.commitments.users,
            "code_sha": reservation.code_sha,
        }
    )
    if recomputed != bind.content(BindRecord).inputs_sha:
        yield Reason(
            "inputs_differ",
            "the digest of all inputs differs from that of plan, configuration, initial weights, "
            "data commitment and code",
            "start a run with a new id",
        )


def rounds(case: Case) -> Iterator[Reason]:
    """Checks that the model's rounds were reserved, logged, signed and committed."""
    evidence, attempt = case.evidence, case.attempt
    if attempt.commit is None:
        return
    commit = attempt.commit.content(CommitRecord)
    started = commit.rounds_started
    ran = evidence.model.body.rounds_run
    planned = case.plan
    if not ran <= started <= case.reservation.rounds == case.plan.rounds:
        yield Reason(
            "more_rounds_than_reserved",
            f"the model was trained for {ran} rounds, but {started} rounds were committed and "
            f"{case.reservation.rounds} reserved",
            "start a run with a new id that reserves all its rounds",
        )
    if not ran == started == planned.rounds:
        yield Reason(
            "stopped_early",
            f"the training stopped after {ran} of {planned.rounds} planned rounds, {started} of "
            "them committed; private data may have decided when to stop",
            "run all planned rounds; or let the policy owner declare why the training stopped: "
            + waiver("stopped_early"),
        )
    if [line.round for line in evidence.rounds] != list(range(started)):
        yield Reason(
            "round_log_incomplete",
            "the round log does not list each committed round once, in order",
            "resume the training, or start a run with a new id",
        )
    if commit.round_log["sha"] != evidence.model_files["rounds.jsonl"]:
        yield Reason(
            "round_log_changed",
            "the round log differs from the one that the trainer signed at commit",
            "use the model artifact of the training step",
        )
    for index, line in enumerate(evidence.rounds):
        expected = public_line(planned, index, line.output_sha)
        if differences(expected.model_dump(), line.model_dump(), tolerance=0.0):
            yield Reason(
                "round_line_differs",
                f"line {index} of the round log must have exactly the round number, the planned "
                "clients, the planned event and the digest of the noised output of its round",
                "start a run with a new id",
            )


def public_line(plan: MechanismPlan, index: int, output_sha: str) -> RoundLine:
    """Returns the public log line that the trainer writes for a round; see `RoundLog.commit`."""
    priced_alone = not plan.tracks_participation
    return RoundLine(
        round=index,
        clients_planned=plan.normalizer,
        output_sha=output_sha,
        event=event_to_json(plan.round_event) if priced_alone else None,
    )


def audit(case: Case) -> Iterator[Reason]:
    """Checks that the audit is of this model, passed its self-test, and refutes no claim."""
    yield from _mechanism_evidence(case)
    yield from _audited_run(case)
    yield from _audit_result(case)


_AUDIT_AGAIN = "run audit_privacy on this model, then account_privacy"


def _mechanism_evidence(case: Case) -> Iterator[Reason]:
    """Checks the trainer's evidence that the priced mechanism ran."""
    audit, config = case.evidence.audit.body, case.evidence.config
    levels = (config.policy.audit_level, case.ledger.terms.audit_level)
    if "full" in levels and audit.mechanism is None:
        yield Reason(
            "audit_full_missing",
            "the policy requires audit_level: full, but the trainer wrote no evidence of its "
            "mechanism",
            "train with this version, or create a policy with audit_level: monitoring",
        )
    if audit.mechanism is not None:
        for code, words in audit.mechanism.failed(case.plan).items():
            yield Reason(code, words, "do not release; the priced mechanism did not run")


def _audited_run(case: Case) -> Iterator[Reason]:
    """Checks that the audit is of this model, run and configuration."""
    audit, model, config = case.evidence.audit.body, case.evidence.model.body, case.evidence.config
    for name, found, wanted in (
        ("level", audit.level, "monitoring" if audit.mechanism is None else "full"),
        ("mechanism", audit.mechanism, model.mechanism_audit),
        ("attack", audit.attack, attack_on(config.task)),
        ("unit", audit.unit, config.policy.unit),
        ("model_sha", audit.model_sha, model.weights_sha),
        ("run_id", audit.run_id, case.reservation.run_id),
        ("config_sha", audit.config_sha, config_digest(case.evidence.config, "audit")),
        ("users_at_most", audit.users_at_most, config.audit.max_users),
        ("bootstrap_samples", audit.bootstrap_samples, config.audit.bootstrap_samples),
        ("split_by_value", audit.split_by_value, config.partition.evaluation.by == "value"),
    ):
        if found != wanted:
            yield Reason("audit_stale", f"the audit belongs to another {name}", _AUDIT_AGAIN)


def _audit_result(case: Case) -> Iterator[Reason]:
    """Checks that the auditor passed its self-test and that the report has no exact figures."""
    audit = case.evidence.audit.body
    if audit.self_test.failed:
        yield Reason(
            "auditor_blind",
            f"the auditor failed its self-test ({', '.join(audit.self_test.failed)}), so its "
            "finding is not valid",
            "fix components/audit_privacy",
        )
    if audit.figures != "private" or audit.measured is not None:
        yield Reason(
            "audit_figures_open",
            "the audit report has exact figures of training users, without noise",
            _AUDIT_AGAIN,
        )


def model(case: Case) -> Iterator[Reason]:
    """Checks that the trainer signed this model and that it has only the backbone's tensors."""
    if case.evidence.model.body.weights_sha != case.evidence.model_files["backbone.keras"]:
        yield Reason(
            "weights_differ",
            "the digest of the model file differs from model.json",
            "use the model artifact of the training step",
        )
    commit = case.attempt.commit
    log = commit.content(CommitRecord).round_log if commit else {}
    if log.get("card_sha") != case.evidence.model.sha:
        yield Reason(
            "model_card_changed",
            "model.json, the card of weights, tensors and noise key, differs from "
            "the one that the trainer signed at commit",
            "use the model artifact of the training step",
        )
    problem = tensor_problem(case.evidence.tensors, case.evidence.model.body.tensors)
    if problem:
        yield Reason(
            "foreign_tensor", problem, "save only the backbone, without head and optimizer slots"
        )


def pretraining(case: Case) -> Iterator[Reason]:
    """Checks that public images were excluded from the private images."""
    if case.evidence.config.pretraining.kind == "import":
        yield Reason(
            "pretraining_overlap_unchecked",
            "the training images of the imported backbone are unknown, perhaps private ones",
            "pretrain from public images, or let the policy owner "
            + waiver("pretraining_overlap_unchecked"),
        )


def key(case: Case) -> Iterator[Reason]:
    """Checks that noise and coins come from the secret key of the reservation."""
    injected = case.evidence.model.body.key_injected
    if injected or not case.report.mechanism.noise.secure:
        yield Reason(
            "key_injected",
            "noise or coins did not come from the secret key of the reservation",
            "run again without an injected key",
        )


def clock(case: Case) -> Iterator[Reason]:
    """Checks that the report is dated at or after the commit and not in the future."""
    made = datetime.fromisoformat(case.report.time)
    commit = case.attempt.commit
    earliest = datetime.fromisoformat(commit.time) if commit else made
    if not earliest - CLOCK_TOLERANCE <= made <= case.now + CLOCK_TOLERANCE:
        yield Reason(
            "clock_skewed",
            "the time of the report is before the commit or in the future",
            "correct the clocks, then run account_privacy again",
        )


def rebuilt(case: Case) -> Iterator[Reason]:
    """Checks that the report equals a report rebuilt from the evidence, field by field."""
    built = build_report(
        case.evidence,
        case.plan,
        case.ledger,
        time=case.report.time,
        head_sequence=case.head,
    )
    tolerance = RELATIVE_TOLERANCE
    if not case.same_environment:
        tolerance = LATER_TOLERANCE
        accounting = built.accounting.model_copy(update={"version": case.report.accounting.version})
        # Another version of NumPy gives other last digits, so the digest is that of the report's
        # own table. The table itself is compared with the recomputed one below.
        table = [row.model_dump(mode="json") for row in case.report.cumulative.blocks]
        cumulative = built.cumulative.model_copy(update={"block_table_sha": json_digest(table)})
        built = built.model_copy(update={"accounting": accounting, "cumulative": cumulative})
    expected = built.content()
    for path in differences(expected, case.signed.content, tolerance=tolerance):
        yield Reason(
            "report_differs",
            f"{path} of the report differs from the value that the evidence gives",
            RERUN,
        )
